"""Find the attention operator's fastest launch shapes on this GPU, and keep them for every later process.

Keys:
  regimes=[encoder,decoder,other]       kinds of calls to tune for
  dtypes=[bf16,fp32]                    of the values; bf16 stands for fp16 too
  directions=[forward,backward]         passes
  head_dim=32                           of a head; with num_heads= and num_points= of your model
  write=true                            keep the winners; false only shows them

Examples:
  python tools/tune_ops.py
  python tools/tune_ops.py 'regimes=[encoder]' 'dtypes=[bf16]' head_dim=64 num_heads=4

Output:
  The winners in ~/.cache/deformable-detr/tuning, next to the compiled kernels; all candidates in
  outputs/tune_ops/tune_ops.md (output_dir=). Nothing else should run on the GPU.
"""

import itertools
import shlex
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from detr.benchmark.ops.inputs import DTYPES, ENCODER_SHAPES, OpCase
from detr.benchmark.ops.tune import ClassResult, TuneSettings, tune_class
from detr.benchmark.ops.tune_bench import KernelBench, tune_case
from detr.benchmark.ops.tune_report import markdown_report, result_line, result_table
from detr.telemetry.environment import collect_environment, format_environment
from ops.msda.cache_dir import cache_dir
from ops.msda.dispatch import runnable_backends
from ops.msda.tuning.device import visible_device
from ops.msda.tuning.launch_shape import TUNED_BACKENDS
from ops.msda.tuning.shape_class import Direction, Regime, Sums
from ops.msda.tuning.shipped import shipped_tuning
from ops.msda.tuning.store import TunedClass, tuning_path, update_tuning
from ops.msda.tuning.table import Device
from tools.launcher import hydra_tool

_CHOICES = {"directions": get_args(Direction), "dtypes": ("bf16", "fp32"), "sums": get_args(Sums)}
_CHOICES |= {"regimes": get_args(Regime), "backends": TUNED_BACKENDS}


@hydra_tool("tune_ops")
def main(cfg: DictConfig) -> None:
    for key, names in _CHOICES.items():
        if not set(cfg[key]) <= set(names) or not cfg[key]:
            raise ValueError(f"{key} must be some of {', '.join(names)}; got {list(cfg[key])}")
    if not torch.cuda.is_available():
        raise ValueError("tools/tune_ops.py times GPU kernels, and no GPU is visible to torch")
    tune_and_keep(cfg, visible_device(torch.cuda.current_device()), cache_dir())


def tune_and_keep(cfg: DictConfig, device: Device, folder: Path) -> None:
    """Tune, write what won to a cache folder after each class, and report."""
    path = tuning_path(device, folder)
    environment = collect_environment()
    date = datetime.now(UTC).date().isoformat()
    versions = {"date": date, "cuda": environment["cuda"], "driver": environment["driver"]}
    versions |= {name: environment["versions"][name] for name in ("torch", "triton")}
    print(format_environment(environment, {"tuning": path if cfg.write else "shown, not kept"}), flush=True)

    results = []
    for result in tune(cfg, device):
        results.append(result)
        print(f"\n{result_table(result, max_rows=5)}\n\n{result_line(result)}", flush=True)
        if cfg.write:
            # after each class, so that an interrupted run keeps what it found
            won = result.choice != result.shipped
            tuned = TunedClass(result.kind, result.choice, result.ms, result.shipped_ms) if won else None
            update_tuning(path, device, result.kind, tuned, {name: str(text) for name, text in versions.items()})
    num_won = sum(result.choice != result.shipped for result in results)
    note = f"{num_won} of {len(results)} shape classes have launch shapes faster than the shipped ones"
    report = markdown_report(
        results,
        command=shlex.join(["python", "tools/tune_ops.py", *sys.argv[1:]]),
        environment=format_environment(environment),
        date=date,
        note=f"{note}.",
    )
    report_path = Path(cfg.output_dir) / f"{cfg.name}.md"
    report_path.parent.mkdir(parents=True, exist_ok=True)
    report_path.write_text(report, encoding="utf-8")
    print(f"\n{note}{f', kept in {path}' if cfg.write and num_won else ''}; all candidates are in {report_path}")


def tune(cfg: DictConfig, device: Device) -> Iterator[ClassResult]:
    """Tune the shape classes of the configuration, one after the other."""
    settings: TuneSettings = instantiate(cfg.search)
    cuda = torch.device("cuda", torch.cuda.current_device())
    head = (cfg.num_queries, cfg.num_heads, cfg.head_dim, cfg.num_points)
    cases = [OpCase("encoder", cfg.batch_size, float(noise_px), *head) for noise_px in cfg.noise_px]
    for regime, dtype_name, (direction, sums) in itertools.product(cfg.regimes, cfg.dtypes, passes(cfg)):
        dtype = DTYPES[dtype_name]
        if sums == "native" and dtype == torch.float32:
            # float32 is its own native accumulator
            continue
        runnable, reasons = runnable_backends(cuda, (("value", dtype),), len(ENCODER_SHAPES))
        backends = [name for name in cfg.backends if name in runnable]
        if not backends:
            raise ValueError(f"none of {', '.join(cfg.backends)} runs here: {'; '.join(reasons)}")
        bench = KernelBench(
            # only an encoder's samples have a spread
            [tune_case(regime, case, device.multiprocessors) for case in (cases if regime == "encoder" else cases[:1])],
            dtype,
            direction,
            sums,
            device=cuda,
            multiprocessors=device.multiprocessors,
            seed=cfg.seed,
        )
        yield tune_class(bench.kind, shipped_tuning(device).choice(bench.kind), backends, bench, settings)
        torch.cuda.empty_cache()


def passes(cfg: DictConfig) -> list[tuple[Direction, Sums | None]]:
    """The forward pass, and the backward pass with each kind of sums."""
    found: list[tuple[Direction, Sums | None]] = []
    if "forward" in cfg.directions:
        found.append(("forward", None))
    if "backward" in cfg.directions:
        found += [("backward", sums) for sums in cfg.sums]
    return found


if __name__ == "__main__":
    main()
