"""Injects faults into training runs and reports what each cost; run by test_faults and scripts/prove_faults.sh.

    python tests/integration/fault_cases.py            all faults; prints the table of docs/reliability.md
    python tests/integration/fault_cases.py NAME ...   some of them; --json for the test

Each run has 12 steps and saves every 2. A fault hits it, the same command is given again, and the end is compared
with that of a run that nothing hit.
"""

import argparse
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from killed_runs import COMPARED, first_difference, run_ranks, train
from torch import Tensor

import detr.engine.trainer as trainer
from detr.benchmark.override_value import quoted_value
from detr.data.loader import LoadFailure, SeededDataset
from detr.data.samplers import Draw
from detr.engine import checkpoint_writer
from detr.engine.checkpoint import load_checkpoint
from detr.engine.preemption import REQUEUE_EXIT_CODE, Preempted
from detr.telemetry.loggers import CompositeLogger, WandbLogger

SAVE_EVERY = 2


@dataclass(frozen=True)
class Outcome:
    """What a fault did to a run.

    Attributes:
        ending: How the run ended, "finished" if it went on to its end.
        message: The first line of what it said.
        num_lost_steps: Steps that had to be made again.
        same_end: Whether it ended, started again where it had to be, with the bits of an unharmed run.
    """

    ending: str
    message: str
    num_lost_steps: int
    same_end: bool


class ActAt:
    """A logger that acts after a step, before it is saved."""

    def __init__(self, run: trainer.Trainer, step: int, act: Callable[[], object]) -> None:
        run.logger = CompositeLogger([run.logger, self])
        self._step = step
        self._act = act

    def log(self, step: int, values: Any) -> None:
        if step == self._step and "train/loss" in values:
            self._act()

    def close(self) -> None:
        pass


def bad_image(run: trainer.Trainer) -> None:
    """An image that cannot be read, found while the run is on its way."""
    load = SeededDataset.__getitem__
    calls = 0

    def load_or_fail(dataset: SeededDataset, draw: Draw) -> Any:
        nonlocal calls
        calls += 1
        # four images a step: the second of step 6
        if calls == 22:
            return LoadFailure(ValueError("image 9: cannot read the image photos/9.jpg (truncated)"))
        return load(dataset, draw)

    SeededDataset.__getitem__ = load_or_fail  # type: ignore[method-assign]


def nan_loss(run: trainer.Trainer) -> None:
    """The box loss of step 7 is NaN."""
    inner, take_step = run.state.criterion._terms, run._step
    is_broken = False

    def terms(*arguments: Any) -> dict[str, Tensor]:
        found = inner(*arguments)
        return found | {"loss_bbox": found["loss_bbox"] * float("nan")} if is_broken else found

    def step(window: Any) -> Any:
        nonlocal is_broken
        # until the next step, so that looking at this one again finds the same
        is_broken = run.progress.global_step == 6
        return take_step(window)

    run.state.criterion._terms = terms  # type: ignore[method-assign]
    run._step = step  # type: ignore[method-assign]


def full_disk(run: trainer.Trainer) -> None:
    """From step 5 on no file can grow beyond 100 kB: a checkpoint breaks off in its middle."""
    ActAt(run, 5, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY)))


def dead_worker(run: trainer.Trainer) -> None:
    """The system kills the data worker at step 7, as it does when memory is used up."""
    ActAt(run, 7, lambda: [os.kill(child.pid or 0, signal.SIGKILL) for child in multiprocessing.active_children()])


def unreachable_wandb(run: trainer.Trainer) -> None:
    """The wandb server does not answer."""
    os.environ.update(WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="0" * 40)
    logger = WandbLogger(project="p", name="n", output_dir=run.folder.path, mode="online")
    run.logger = CompositeLogger([run.logger, logger])


def sigterm(run: trainer.Trainer) -> None:
    """The scheduler asks for the machine during step 7; torchrun repeats the signal."""
    ActAt(run, 6, lambda: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)])


def sigterm_twice(run: trainer.Trainer) -> None:
    """The scheduler asks during step 7, the disk is slow, and it loses patience in the middle of the save."""
    write = checkpoint_writer.write_payload

    def write_slowly(payload: dict[str, Any], path: Path) -> None:
        if payload["global_step"] != 7:
            write(payload, path)
            return
        path.with_name(f".{path.name}.tmp").write_bytes(b"half a checkpoint")
        time.sleep(60)

    checkpoint_writer.write_payload = write_slowly

    def ask_twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        # later than what counts as the same request
        threading.Timer(10.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

    ActAt(run, 6, ask_twice)


def kill_9(run: trainer.Trainer) -> None:
    """SIGKILL after step 7."""
    ActAt(run, 7, lambda: os.kill(os.getpid(), signal.SIGKILL))


def truncated_last(run: trainer.Trainer) -> None:
    """SIGKILL after step 7, and last.pt loses its end."""

    def cut_and_die() -> None:
        run.writer.wait()
        run.folder.last.unlink()
        run.folder.last.write_bytes(run.folder.step_checkpoints()[0].read_bytes()[:-1000])
        run.folder.step_checkpoints()[0].unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    ActAt(run, 7, cut_and_die)


FAULTS: dict[str, Callable[[trainer.Trainer], None]] = {
    "bad image": bad_image,
    "NaN loss at step 7": nan_loss,
    "full disk": full_disk,
    "dead worker": dead_worker,
    "wandb unreachable": unreachable_wandb,
    "SIGTERM": sigterm,
    "SIGTERM twice": sigterm_twice,
    "kill -9": kill_9,
    "truncated last.pt": truncated_last,
}


def run_once(path: Path, num_workers: int, fault: Callable[[trainer.Trainer], None] | None) -> None:
    """Train in this process; how it ended goes to ending.json."""
    steps = path / "steps.txt"

    def prepare(run: trainer.Trainer) -> None:
        for step in range(1, 13):
            ActAt(run, step, lambda step=step: steps.write_text(str(step)))
        if fault is not None:
            fault(run)

    ending = {"ending": "finished", "message": ""}
    code = 0
    try:
        train(path, SAVE_EVERY, None, prepare, num_workers=num_workers)
    except Preempted as error:
        code = REQUEUE_EXIT_CODE
        ending = {"ending": f"exit {code}", "message": str(error)}
    except (OSError, ValueError, RuntimeError) as error:
        code = 1
        ending = {"ending": f"exit 1, {type(error).__name__}", "message": str(error).splitlines()[0]}
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (path / "ending.json").write_text(json.dumps(ending))
    raise SystemExit(code)


def rank_killed_under_torchrun(folder: Path) -> Outcome:
    """One of two ranks is killed once there is a checkpoint; torchrun starts both again, by the same command."""
    repository = Path(__file__).resolve().parents[2]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    settings = ["experiment=debug_cpu", "data.size=64", "schedule.epochs=3", "trainer.save_every_steps=1"]
    output_dir = folder / "elastic"
    settings += ["data.batch_size=1", f"output_dir={quoted_value(str(output_dir))}"]
    with (folder / "elastic.log").open("w+") as log:
        process = subprocess.Popen(
            [*torchrun, str(repository / "tools" / "train.py"), *settings],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        while not (output_dir / "step_00000003.pt").exists() and process.poll() is None:
            time.sleep(0.02)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        code = process.wait(timeout=300)
        log.seek(0)
        text = log.read()
    begins = re.findall(r"resuming after step (\d+)", text)
    before = text[: text.rindex("resuming after step")]
    made = max(int(step) for step in re.findall(r"^step (\d+)/", before, flags=re.MULTILINE))
    message = f"torchrun started both ranks again after step {begins[-1]}"
    return Outcome("finished" if code == 0 else f"exit {code}", message, made - int(begins[-1]), code == 0)


def inject(folder: Path, name: str, expected: Path) -> Outcome:
    """One fault, and what it cost."""
    path = folder / name.replace(" ", "_")
    num_workers = 1 if name == "dead worker" else 0
    finished = run_ranks(1, run_once, path, num_workers, FAULTS[name])
    made = int((path / "steps.txt").read_text())
    killed = {"ending": "killed by the signal", "message": ""}
    ending = json.loads((path / "ending.json").read_text()) if (path / "ending.json").exists() else killed
    num_lost = 0
    if not finished:
        assert run_ranks(1, run_once, path, num_workers, None), "the same command again does not finish"
        num_lost = made - int((path / "begins_at.txt").read_text())
    ends = [load_checkpoint(run / "last.pt") for run in (expected, path)]
    differences = [first_difference(*(getattr(end, field) for end in ends), field) for field in COMPARED]
    return Outcome(ending["ending"], ending["message"].replace(str(path), "RUN"), num_lost, not any(differences))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(FAULTS)}")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        whole = folder / "whole"
        assert run_ranks(1, run_once, whole, 0, None), "the run that nothing hits failed"
        outcomes = {name: inject(folder, name, whole) for name in arguments.names or FAULTS}
        if not arguments.names:
            outcomes["kill -9 of a rank, torchrun --max-restarts=1"] = rank_killed_under_torchrun(folder)
    if arguments.json:
        json.dump({name: asdict(outcome) for name, outcome in outcomes.items()}, sys.stdout)
        return
    print("| fault | the run | steps made again | ends with the same bits |\n|---|---|---|---|")
    for name, outcome in outcomes.items():
        same = "yes" if outcome.same_end else "no"
        print(f"| {name} | {outcome.ending}: {outcome.message} | {outcome.num_lost_steps} | {same} |")


if __name__ == "__main__":
    main()
