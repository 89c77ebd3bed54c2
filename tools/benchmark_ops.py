"""Time the attention operator alone, one row a backend, accumulator, dtype and workload, on one GPU.

Keys:
  benchmark=ops_encoder          the rows, of configs/benchmark: ops_encoder, ops_decoder, ops_fused, ops_memory, ...
  benchmark.batch_sizes=[2,8]    images at once, of that preset
  benchmark.dtypes=[fp32,bf16]   likewise
  name=benchmark_ops             the results are in outputs/NAME
  seed=42                        of the inputs

Examples:
  python tools/benchmark_ops.py benchmark=ops_encoder
  python tools/benchmark_ops.py benchmark=ops_decoder 'benchmark.dtypes=[bf16]'

Output:
  outputs/benchmark_ops (output_dir=): a table, .csv, .jsonl and .png by the name of the preset; the table on the
  screen. scripts/benchmark_findings.sh runs the presets of docs/findings.md.
"""

import itertools
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from detr.benchmark.ops.fused import FusedRow, check_form, time_form, with_step_times
from detr.benchmark.ops.fused_report import fused_markdown, plot_fused
from detr.benchmark.ops.inputs import OpCase
from detr.benchmark.ops.measure import OpVariant, measure_workload
from detr.benchmark.ops.report import markdown_report, plot_report, plot_spread
from detr.benchmark.ops.row import OpRow, write_rows
from detr.benchmark.origin import Origin
from detr.telemetry.environment import collect_environment, format_environment
from ops.msda.tuning.device import device_tuning
from tools.benchmark_findings import FINDINGS, launch_tilings_once, run_finding
from tools.launcher import hydra_tool


@hydra_tool("benchmark_ops")
def main(cfg: DictConfig) -> None:
    name = str(HydraConfig.get().runtime.choices.benchmark)
    if "case" not in cfg.benchmark:
        raise ValueError(f"benchmark={name} is for tools/benchmark.py; here use ops_encoder, ops_decoder, ...")
    needs_gpu = cfg.benchmark.case != "flops" and cfg.benchmark.get("compile_for") is None
    if needs_gpu and not torch.cuda.is_available():
        raise ValueError("tools/benchmark_ops.py times GPU kernels, and no GPU is visible to torch")
    if cfg.benchmark.get("profile_only", False):
        launch_tilings_once(cfg)
        return
    title = f"MSDA operator: {name}"
    tuned = device_tuning(torch.cuda.current_device()).source if needs_gpu else None
    environment = format_environment(collect_environment(), {"shapes": "shipped" if tuned is None else tuned})
    command = shlex.join(["python", "tools/benchmark_ops.py", *sys.argv[1:]])
    origin = Origin(title, command, environment, datetime.now(UTC).date().isoformat(), f"{name}.png")
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / origin.picture
    rows: Sequence[Any]
    if cfg.benchmark.case in FINDINGS:
        rows, report = run_finding(cfg, origin, picture)
    elif cfg.benchmark.case == "fused":
        rows = measure_fused_rows(cfg)
        report = fused_markdown(rows, origin)
        plot_fused(rows, picture, title=title)
    else:
        rows = measure_rows(cfg)
        report = markdown_report(rows, origin)
        plot = plot_spread if len(cfg.benchmark.noise_px) > 1 else plot_report
        plot(rows, picture, title=title)
    (folder / f"{name}.md").write_text(report, encoding="utf-8")
    write_rows(rows, folder / f"{name}.csv", folder / f"{name}.jsonl")
    print(report)


def measure_rows(cfg: DictConfig) -> list[OpRow]:
    """Every combination of the preset. The rows of one workload are timed in turns, so that drift meets all."""
    rows = []
    settings = itertools.product(cfg.benchmark.batch_sizes, cfg.benchmark.dtypes, cfg.benchmark.noise_px)
    for batch_size, dtype, noise_px in settings:
        case = OpCase(cfg.benchmark.case, batch_size, noise_px=float(noise_px))
        variants = [OpVariant(**options) for options in cfg.benchmark.rows]
        if dtype == "fp32":
            # float32 is its own native accumulator
            variants = [v for v in variants if v.accumulator == "float32" or v.backend == "deformops"]
        counts = {"num_warmup": cfg.benchmark.num_warmup, "num_iterations": cfg.benchmark.num_iterations}
        rows += measure_workload(case, dtype, variants, rounds=cfg.benchmark.rounds, **counts, seed=cfg.seed)
        for row in rows[-len(variants) :]:
            print(f"{row.case} N={row.batch_size} {row.dtype} {row.name}: {row.status}", file=sys.stderr, flush=True)
    return rows


def measure_fused_rows(cfg: DictConfig) -> list[FusedRow]:
    """Every combination of the preset; the forms of one workload are timed in turns."""
    done = []
    counts = {"num_warmup": cfg.benchmark.num_warmup, "num_iterations": cfg.benchmark.num_iterations}
    settings = itertools.product(cfg.benchmark.batch_sizes, cfg.benchmark.dtypes, cfg.benchmark.noise_px)
    for batch_size, dtype, noise_px in settings:
        case = OpCase("encoder", batch_size, noise_px=float(noise_px))
        names = [(options.backend, options.form) for options in cfg.benchmark.rows]
        if dtype == "fp32":
            # nothing to cast
            names = [(backend, form) for backend, form in names if form != "eager_cast"]
        rows = [check_form(case, dtype, *name, seed=cfg.seed) for name in names]
        samples: list[list[float]] = [[] for _ in rows]
        for _ in range(cfg.benchmark.rounds):
            for row, name, pooled in zip(rows, names, samples, strict=True):
                if row.status == "ok":
                    pooled += time_form(case, dtype, *name, seed=cfg.seed, **counts)
                    torch.cuda.empty_cache()
        for row, pooled in zip(rows, samples, strict=True):
            done.append(with_step_times(row, pooled) if row.status == "ok" else row)
            print(f"fused N={batch_size} {dtype} {row.backend} {row.form}: {row.status}", file=sys.stderr, flush=True)
    return done


if __name__ == "__main__":
    main()
