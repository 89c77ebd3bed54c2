"""Time the MSDA operator alone: `python tools/benchmark_ops.py benchmark=NAME [key=value ...]`.

One row a backend, accumulator, dtype and workload, all in one process on one GPU. Writes NAME.md, NAME.csv,
NAME.jsonl and NAME.png to `output_dir`. The keys are those of configs/benchmark_ops.yaml.
"""

import itertools
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from detr.benchmark.op_inputs import OpCase
from detr.benchmark.op_measure import OpVariant, measure
from detr.benchmark.op_report import markdown_report, plot_report, plot_spread
from detr.benchmark.op_row import OpRow, write_rows
from detr.telemetry.environment import collect_environment, format_environment
from tools.launcher import hydra_tool


@hydra_tool("benchmark_ops")
def main(cfg: DictConfig) -> None:
    if not torch.cuda.is_available():
        raise ValueError("tools/benchmark_ops.py times GPU kernels, and no GPU is visible to torch")
    name = str(HydraConfig.get().runtime.choices.benchmark)
    if "case" not in cfg.benchmark:
        raise ValueError(f"benchmark={name} is for tools/benchmark.py; here use ops_encoder, ops_decoder, ...")
    rows = list(measure_rows(cfg))
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    report = markdown_report(
        rows,
        title=f"MSDA operator: {name}",
        command=shlex.join(["python", "tools/benchmark_ops.py", *sys.argv[1:]]),
        environment=format_environment(collect_environment()),
        date=datetime.now(UTC).date().isoformat(),
    )
    (folder / f"{name}.md").write_text(report, encoding="utf-8")
    write_rows(rows, folder / f"{name}.csv", folder / f"{name}.jsonl")
    plot = plot_spread if len(cfg.benchmark.noise_px) > 1 else plot_report
    plot(rows, folder / f"{name}.png", title=f"MSDA operator: {name}")
    print(report)


def measure_rows(cfg: DictConfig) -> list[OpRow]:
    """Every combination of the preset, in order."""
    rows = []
    settings = itertools.product(cfg.benchmark.batch_sizes, cfg.benchmark.dtypes, cfg.benchmark.noise_px)
    for batch_size, dtype, noise_px in settings:
        case = OpCase(cfg.benchmark.case, batch_size, noise_px=float(noise_px))
        for options in cfg.benchmark.rows:
            variant = OpVariant(**options)
            if dtype == "fp32" and variant.accumulator == "native" and variant.backend != "deformops":
                # float32 is native already
                continue
            row = _measure(case, dtype, variant, cfg)
            print(f"{row.case} N={row.batch_size} {row.dtype} {row.name}: {row.status}", file=sys.stderr, flush=True)
            rows.append(row)
            torch.cuda.empty_cache()
    return rows


def _measure(case: OpCase, dtype: str, variant: OpVariant, cfg: DictConfig) -> OpRow:
    try:
        return measure(
            case,
            dtype,
            variant,
            num_warmup=cfg.num_warmup,
            num_iterations=cfg.num_iterations,
            seed=cfg.seed,
        )
    except ImportError as error:
        reason = f"not installed ({error})"
    return OpRow(
        case.kind,
        case.batch_size,
        case.noise_px,
        dtype,
        variant.backend,
        variant.accumulator,
        variant.deterministic,
        reason,
    )


if __name__ == "__main__":
    main()
