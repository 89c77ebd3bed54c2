"""What every rank must have been told alike: else each would train other weights, and nothing would say so."""

from collections.abc import Mapping
from typing import Any

from detr.distributed import require_same
from detr.engine.run_folder import flatten

# where machines may differ: names that hold the time, the place of files (whose content is compared), hardware
_OF_A_MACHINE = (
    *("name", "output_dir", "logger", "report"),
    *("data.root", "data.train", "data.val", "data.cache_dir", "data.num_workers"),
)


def require_same_run(config: Mapping[str, Any], data: Mapping[str, str], code: Mapping[str, str | None]) -> None:
    """Refuse ranks that were started with other code or settings, or see another dataset. A collective.

    Args:
        config: The resolved configuration of this rank.
        data: Fingerprints of the dataset that this rank reads.
        code: Versions of what this rank computes with, see `code_facts`.

    Raises:
        ValueError: A rank differs from rank 0; raised on every rank.
    """
    settings = {
        key: value
        for key, value in flatten(config).items()
        if not any(key == own or key.startswith(own + ".") for own in _OF_A_MACHINE)
    }
    require_same(code, advice="install the same code and packages on every machine")
    # before settings, which follow from it: the number of queries from its fullest image
    require_same(
        {f"data {split}": fingerprint for split, fingerprint in data.items()},
        advice="give every machine the same copy of the dataset",
    )
    require_same(settings, advice="give the same command on every machine")
