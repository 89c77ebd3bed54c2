"""One of several ranks says what all meet alike; each says what it alone may meet."""

import io
import logging

import pytest

from detr.rank_logging import OF_THIS_RANK, log_as_rank

SAID = [
    ("detr.data.coco", logging.INFO, {}),
    ("detr.data.coco", logging.WARNING, {}),
    ("tools.launcher", logging.WARNING, {}),
    ("ops", logging.INFO, {}),
    ("ops", logging.WARNING, {}),
    ("detr.engine.step", logging.WARNING, OF_THIS_RANK),
    ("detr.engine.watchdog", logging.ERROR, {}),
    ("timm", logging.WARNING, {}),
]
ALL = [f"{name} {level}" for name, level, _ in SAID]


def said_by(rank, local_rank):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(name)s %(message)s"))
    log_as_rank([handler], rank=rank, local_rank=local_rank)
    for name, level, extra in SAID:
        logger = logging.Logger(name)
        logger.addHandler(handler)
        logger.log(level, "%d", level, extra=extra)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("rank", "local_rank", "expected"),
    [
        (0, 0, [*ALL[:5], f"rank 0: {ALL[5]}", *ALL[6:]]),
        (3, 3, [f"rank 3: {ALL[5]}", *ALL[6:]]),
        # of another machine, whose compiler and tuned kernels may be others
        (8, 0, [ALL[4], f"rank 8: {ALL[5]}", *ALL[6:]]),
    ],
)
def test_what_all_ranks_meet_is_said_by_one(rank, local_rank, expected):
    assert said_by(rank, local_rank) == expected


def test_a_handler_without_a_format_writes_the_message():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    log_as_rank([handler], rank=1, local_rank=1)
    logger = logging.Logger("detr.losses.matcher")
    logger.addHandler(handler)
    logger.warning("image %d", 7, extra=OF_THIS_RANK)
    assert stream.getvalue() == "rank 1: image 7\n"
