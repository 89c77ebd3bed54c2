"""Shows that a run on several ranks is the run on one; used by scripts/prove_scaling.sh.

    python tests/integration/scaling_runs.py FOLDER --ranks 4 --steps 60 --overrides KEY=VALUE...

The same images a step on one rank (accumulated) and on all: losses may differ by rounding only, of which a third run on
one rank, in half as large batches, shows how much that is. Dropout must be off, since ranks draw their own masks, and
all batches of one padded size (data.pad_to), since group norm sees the padding; batch norms must be frozen. Then a
rank is killed in mid-run and torchrun starts them again from the last checkpoint. Prints one line a finding; exits
with 1 if one is not as it should be.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from detr.benchmark.override_value import quoted_value
from detr.telemetry.loggers import read_metrics

TRAIN = Path(__file__).parents[2] / "tools" / "train.py"
# what rounding alone does to the losses of a run, if the third run by chance stays closer than that
LEAST_NOISE = 1e-4


def command(folder: Path, ranks: int, arguments: list[str], *, restarts: int = 0) -> list[str]:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += [f"--nproc_per_node={ranks}", f"--max-restarts={restarts}"]
    return [*launcher, str(TRAIN), *arguments, f"output_dir={quoted_value(str(folder))}"]


def run_to_end(folder: Path, ranks: int, arguments: list[str]) -> list[float]:
    """The loss of every step."""
    say_if_complete(folder)
    finished = subprocess.run(command(folder, ranks, arguments), capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(f"BAD  {folder.name} ended with {finished.returncode}:\n{finished.stderr[-3000:]}")
    return losses(folder)


def losses(folder: Path) -> list[float]:
    return [row["train/loss"] for row in read_metrics(folder / "metrics.jsonl") if "train/loss" in row]


def difference(run: list[float], reference: list[float]) -> float:
    """Mean relative difference of the losses of two runs."""
    pairs = list(zip(run, reference, strict=True))
    return sum(abs(mine - theirs) / theirs for mine, theirs in pairs) / len(pairs)


def run_and_kill(folder: Path, ranks: int, arguments: list[str], *, step: int) -> list[float]:
    """The same run, whose last rank is killed once `step` steps are logged; from its start, unless it is complete."""
    if say_if_complete(folder):
        return losses(folder)
    shutil.rmtree(folder, ignore_errors=True)
    with (folder.parent / "killed.log").open("w") as log:
        launcher = subprocess.Popen(command(folder, ranks, arguments, restarts=1), stdout=log, stderr=log)
        try:
            while not any(row.get("step", 0) >= step for row in rows_so_far(folder)):
                if launcher.poll() is not None:
                    raise SystemExit(f"BAD  the run ended before its step {step}; see {log.name}")
                time.sleep(0.1)
            os.kill(pid_of_rank(launcher.pid, ranks - 1), signal.SIGKILL)
            if launcher.wait() != 0:
                raise SystemExit(f"BAD  the run did not survive the kill; see {log.name}")
        finally:
            launcher.terminate()
    return losses(folder)


def say_if_complete(folder: Path) -> bool:
    """Whether an earlier start has made this run, perhaps with other code."""
    is_complete = (folder / "metrics.json").exists()
    if is_complete:
        print(f"{folder.name} is taken as an earlier start left it; remove {folder} to run it again", flush=True)
    return is_complete


def rows_so_far(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def pid_of_rank(launcher: int, rank: int) -> int:
    """The process that torchrun started as `rank`."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) != launcher:
                continue
            environment = (stat.parent / "environ").read_bytes().split(b"\0")
        except (ProcessLookupError, FileNotFoundError):
            # ended meanwhile
            continue
        if f"RANK={rank}".encode() in environment:
            return int(stat.parent.name)
    raise SystemExit(f"BAD  rank {rank} is not a child of torchrun")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the runs; what is there already is not run again")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=2, help="images a rank")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--overrides", nargs="+", default=[], help="of tools/train.py")
    options = parser.parse_args()
    if options.batch_size < 2 or options.batch_size % 2:
        raise SystemExit("the batch size must be even: one run takes half of it")
    if options.ranks < 2:
        raise SystemExit(
            f"--ranks is at least 2: a run on one rank is what others are compared with; got {options.ranks}"
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    total = options.ranks * options.batch_size
    shared = [
        *options.overrides,
        *("schedule.epochs=1", f"data.num_train_images={total * options.steps}", "model.dropout=0.0"),
        *("trainer.log_every=1", f"trainer.save_every_steps={max(1, options.steps // 6)}"),
    ]

    def arguments(batch_size: int, accumulate: int) -> list[str]:
        return [*shared, f"data.batch_size={batch_size}", f"trainer.accumulate={accumulate}"]

    one = run_to_end(options.folder / "one_rank", 1, arguments(options.batch_size, options.ranks))
    halves = run_to_end(options.folder / "one_rank_halves", 1, arguments(options.batch_size // 2, 2 * options.ranks))
    every = run_to_end(options.folder / "all_ranks", options.ranks, arguments(options.batch_size, 1))
    killed = run_and_kill(
        options.folder / "killed", options.ranks, arguments(options.batch_size, 1), step=options.steps // 2
    )

    noise = max(LEAST_NOISE, difference(halves, one))
    found = {
        "steps": len(one),
        "first loss, last loss": (one[0], one[-1]),
        "first step": difference(every[:1], one[:1]),
        "one rank in half as large batches": difference(halves, one),
        f"{options.ranks} ranks": difference(every, one),
        "killed and started again": difference(killed, every),
    }
    print(json.dumps(found, indent=2))
    # before rounding has grown
    right = difference(every[:1], one[:1]) < LEAST_NOISE
    print(f"{'ok  ' if right else 'BAD '} the first step's loss differs by {difference(every[:1], one[:1]):.2g}")
    for name, value in ((f"{options.ranks} ranks", difference(every, one)), ("killed", difference(killed, every))):
        is_right = value <= 2 * noise
        right &= is_right
        print(f"{'ok  ' if is_right else 'BAD '} {name}: losses differ by {value:.3%}; rounding alone by {noise:.3%}")
    raise SystemExit(0 if right else 1)


if __name__ == "__main__":
    main()
