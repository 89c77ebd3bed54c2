"""Kills training runs with SIGKILL at random moments and checks what is left; run by scripts/prove_resume.sh.

    python tests/integration/killed_runs.py resume --kills 20 --world-sizes 1 2
    python tests/integration/killed_runs.py saving --kills 100

`resume`: a run of N steps that is killed and started again ends with the bits of one that nothing stopped: model,
average, optimizer, schedule and the random streams of every rank. `saving`: a process that does nothing but save is
killed; a checkpoint at least as new as the last one it had finished is found, and last.pt is never corrupt.
"""

import argparse
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

import detr.engine.trainer as trainer
from detr.data import EvalTransform, flip_and_resize, synthetic_data
from detr.distributed import cleanup, init_distributed, is_main
from detr.engine.checkpoint import Checkpoint, load_checkpoint
from detr.engine.checkpoint_writer import CheckpointWriter
from detr.engine.interval import steps_per_epoch
from detr.engine.optim import build_adamw
from detr.engine.precision import Precision
from detr.engine.random_state import seed_everything
from detr.engine.restore import Progress, resume
from detr.engine.run_checkpoint import RunDescription
from detr.engine.run_folder import RunFolder, open_run_folder, write_config
from detr.engine.schedule import StepDecay
from detr.engine.settings import TrainerSettings
from detr.engine.state import build_train_state
from detr.evaluation import CocoEvaluator, PostProcess
from detr.losses import HungarianMatcher, SetCriterion
from detr.models import Backbone, deformable_detr
from detr.structures import ClassTable
from detr.telemetry.loggers import CompositeLogger, JsonlLogger, Logger

NUM_CLASSES = 3
EPOCHS = 2
STEPS_PER_EPOCH = 6
# all that decides how a run goes on, and what it says at its end
COMPARED = (
    *("model", "ema", "optimizer", "schedule", "scaler", "random_states"),
    *("epoch", "epoch_samples", "global_step", "metrics", "best"),
)
CONFIG = {"name": "killed", "seed": 3}

_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Kill:
    """A SIGKILL of rank `victim`, `delay_s` after it has finished optimizer step `step`."""

    step: int
    delay_s: float
    victim: int


class KillingLogger:
    """Sets the kill off in its own thread, so that it may hit a step, the data or a save."""

    def __init__(self, kill: Kill | None) -> None:
        self._kill = kill

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._kill is not None and step == self._kill.step:
            threading.Timer(self._kill.delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def close(self) -> None:
        pass


def train(
    output_dir: Path,
    save_every_steps: int,
    kill: Kill | None,
    before_fit: Callable[[trainer.Trainer], None] | None = None,
    num_workers: int = 0,
) -> None:
    """One rank of a run with batch statistics, dropout, an average, and windows of two batches."""
    torch.set_num_threads(1)
    # the pictures cost a second a run and hold no state
    trainer.plot_curves = lambda metrics_log, folder: None
    context = init_distributed("cpu")
    batch_size = 2 // context.world_size
    data = synthetic_data(
        size=64,
        num_classes=NUM_CLASSES,
        num_train_images=4 * STEPS_PER_EPOCH + 1,
        num_val_images=3,
        seed=0,
        batch_size=batch_size,
        val_batch_size=None,
        num_workers=num_workers,
        pad_to=1,
        train_transforms=flip_and_resize(None),
        eval_transforms=EvalTransform(None, None),
    )
    folder = open_run_folder(output_dir, CONFIG, resume="auto")
    settings = TrainerSettings(
        accumulate=2, ema_decay=0.9, log_every=1, eval_every=EPOCHS, save_every_steps=save_every_steps
    )
    shard = {"rank": context.rank, "world_size": context.world_size}
    loader = data.train_loader(seed=5, **shard)
    seed_everything(1, rank=0)
    model = deformable_detr(
        Backbone("test_resnet", freeze_norm=False),
        num_classes=NUM_CLASSES,
        num_queries=8,
        num_levels=2,
        d_model=32,
        num_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=2,
        dim_feedforward=32,
        dropout=0.1,
        with_box_refine=True,
    )
    state = build_train_state(
        model,
        SetCriterion(num_classes=NUM_CLASSES, matcher=HungarianMatcher()),
        build_adamw,
        StepDecay(epochs=EPOCHS, milestones=(1,)),
        Precision("fp32"),
        context,
        total_batch=4,
        steps_per_epoch=steps_per_epoch(loader, settings.accumulate),
        ema_decay=settings.ema_decay,
    )
    seed_everything(2, context.rank)
    progress = Progress()
    if folder.resume_from is not None:
        progress = resume(state, folder.resume_from, class_table=data.class_table, context=context)
    loggers: list[Logger] = [KillingLogger(kill if kill is not None and kill.victim == context.rank else None)]
    if is_main():
        loggers.insert(0, JsonlLogger(folder.metrics_log))
        write_config(folder.path, CONFIG)
        (folder.path / "begins_at.txt").write_text(str(progress.global_step))
    run = trainer.Trainer(
        state,
        loader,
        data.val_loader(**shard),
        CocoEvaluator(data.val_ground_truth(), data.class_table),
        PostProcess(),
        settings=settings,
        folder=folder,
        description=RunDescription(data.class_table, data.preprocessing, CONFIG),
        context=context,
        progress=progress,
        logger=CompositeLogger(loggers),
    )
    if before_fit is not None:
        before_fit(run)
    run.fit()
    cleanup()


def run_ranks(world_size: int, work: Callable[..., None], *arguments: Any, timeout_s: float = 120) -> bool:
    """Run `work` in forked processes, one a rank; when one dies the others are killed. True if all ended well."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]

    def rank_main(rank: int) -> None:
        if world_size > 1:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(world_size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
        work(*arguments)

    processes: list[BaseProcess] = [_fork.Process(target=rank_main, args=(rank,)) for rank in range(world_size)]
    for process in processes:
        process.start()
    deadline_s = time.monotonic() + timeout_s
    while any(process.is_alive() for process in processes):
        if time.monotonic() > deadline_s:
            print("the ranks hang", file=sys.stderr)
        if time.monotonic() > deadline_s or any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
        time.sleep(0.005)
    return all(process.exitcode == 0 for process in processes)


def first_difference(one: Any, other: Any, where: str) -> str | None:
    """Where two nested containers differ in a bit, or None."""
    if isinstance(one, torch.Tensor):
        return None if torch.equal(one, other) else where
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return where
        pairs = [(f"{where}.{key}", one[key], other[key]) for key in one]
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            return where
        pairs = [(f"{where}[{index}]", *pair) for index, pair in enumerate(zip(one, other, strict=True))]
    else:
        return None if one == other else where
    differences = (first_difference(first, second, name) for name, first, second in pairs)
    return next((difference for difference in differences if difference is not None), None)


def prove_resume(folder: Path, *, num_kills: int, world_size: int, seed: int) -> int:
    """Kill and resume runs; returns how many ended otherwise than the unbroken one."""
    draw = random.Random(1000 * world_size + seed)
    whole = folder / f"whole_{world_size}"
    assert run_ranks(world_size, train, whole, 1, None), "the run that nothing stops failed"
    expected = load_checkpoint(whole / "last.pt")
    num_steps = EPOCHS * STEPS_PER_EPOCH
    assert expected.global_step == num_steps
    num_failures = 0
    for number in range(num_kills):
        kill = Kill(draw.randrange(1, num_steps), draw.random() * 0.15, draw.randrange(world_size))
        every = draw.choice((1, 2, 4))
        path = folder / f"killed_{world_size}_{number}"
        died = not run_ranks(world_size, train, path, every, kill)
        ended = run_ranks(world_size, train, path, every, None)
        begins_at = int((path / "begins_at.txt").read_text())
        last = load_checkpoint(path / "last.pt")
        differences = [first_difference(getattr(expected, name), getattr(last, name), name) for name in COMPARED]
        found = [difference for difference in differences if difference is not None]
        # a run that the kill came too late for proves nothing
        is_proof = died and ended and not found
        num_failures += not is_proof
        print(
            f"{world_size} ranks, saving every {every} steps: rank {kill.victim} killed {1e3 * kill.delay_s:.0f} ms "
            f"after step {kill.step}, went on from {begins_at}: "
            + ("the same bits" if is_proof else f"FAILED ({died=}, {ended=}, differs: {found})"),
            flush=True,
        )
    return num_failures


def save_forever(folder: Path, first: int) -> None:
    """Save checkpoints of 8 MB as fast as it goes, every third the best; finished ones go to finished.txt."""
    run = RunFolder(folder, None)
    writer = CheckpointWriter(run, keep_last=2)
    finished = os.open(folder / "finished.txt", os.O_WRONLY | os.O_CREAT)
    for step in range(first, first + 100_000):
        writer.save(_checkpoint(step), is_best=step % 3 == 1)
        writer.wait()
        os.pwrite(finished, f"{step:08d}".encode(), 0)


def prove_saving(folder: Path, *, num_kills: int, seed: int) -> int:
    """Kill a process that saves; returns how often what it left was not what it should be."""
    draw = random.Random(seed)
    folder = folder / "saving"
    write_config(folder, CONFIG)
    num_failures = num_during_save = 0
    step = 0
    for _ in range(num_kills):
        process = _fork.Process(target=save_forever, args=(folder, step + 1))
        process.start()
        while _last_finished(folder) <= step:
            time.sleep(0.002)
        time.sleep(draw.random() * 0.1)
        process.kill()
        process.join()
        step = _last_finished(folder)
        num_during_save += any(folder.glob(".*.tmp"))
        try:
            found = open_run_folder(folder, CONFIG, resume="auto").resume_from
            assert found == folder / "last.pt", f"resumes from {found}"
            checkpoints = {name: load_checkpoint(folder / name) for name in ("last.pt", "best.pt")}
            for name, checkpoint in checkpoints.items():
                assert bool((checkpoint.model["weight"] == checkpoint.global_step).all()), f"{name} is mixed"
            assert checkpoints["last.pt"].global_step >= step, "an older checkpoint than the finished one"
        except (AssertionError, ValueError, FileNotFoundError) as error:
            num_failures += 1
            print(f"after step {step}: {error}", flush=True)
        step += 1
    print(f"{num_kills} kills while saving ({num_during_save} within a file): {num_failures} unusable", flush=True)
    return num_failures


def _last_finished(folder: Path) -> int:
    path = folder / "finished.txt"
    text = path.read_text() if path.exists() else ""
    return int(text) if len(text) == 8 else 0


def _checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        epoch=step,
        global_step=step,
        model={"weight": torch.full((2_000_000,), float(step))},
        optimizer={},
        schedule={},
        scaler={},
        ema=None,
        random_states=[],
        class_table=ClassTable(("cat",), (1,)),
        preprocessing={},
        config=CONFIG,
        metrics={},
        best={},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["resume", "saving"])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    num_failures = 0
    with tempfile.TemporaryDirectory() as name:
        if "saving" in arguments.what:
            num_failures += prove_saving(Path(name), num_kills=arguments.kills, seed=arguments.seed)
        if "resume" in arguments.what:
            for world_size in arguments.world_sizes:
                num_failures += prove_resume(
                    Path(name), num_kills=arguments.kills, world_size=world_size, seed=arguments.seed
                )
    raise SystemExit(1 if num_failures else 0)


if __name__ == "__main__":
    main()
