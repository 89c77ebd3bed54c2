"""Time whole training steps, one row a configuration, each in fresh processes and in an order that cancels drift.

Keys:
  benchmark=smoke        the rows, of configs/benchmark: batches, kernels, precision, data, recipe, scaling, ...
  only=null              rows of the preset to measure, as [a,b]; null: all
  batch_size=16          images a GPU, where the rows do not say
  data_source=synthetic  synthetic | cached | loader: batches in memory, images in memory, the DataLoader on files
  extra_rows=[]          rows.jsonl files of other runs, to stand in the report too
  time_limit_s=null      rows that would probably end later are not started

Examples:
  python tools/benchmark.py benchmark=smoke
  python tools/benchmark.py benchmark=kernels precision=bf16
  python tools/benchmark.py benchmark=batches output_dir=outputs/batches logger=wandb

Output:
  outputs/benchmark (output_dir=): rows.jsonl, report.md, kernels.md, rows.csv and report.png; a row that fails keeps
  its reason. logger=wandb or tensorboard gets the table and the picture too. benchmark=numerics compares loss curves.
"""

import shlex
import sys
from pathlib import Path

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from PIL import Image

from detr.benchmark.override_value import quoted_value
from detr.benchmark.steps.data import jpeg_sizes, write_jpeg_dataset
from detr.benchmark.steps.matrix import run_matrix
from detr.benchmark.steps.numerics import numerics_report, plot_numerics
from detr.benchmark.steps.report import kernel_report, markdown_report, plot_report
from detr.benchmark.steps.row import StepRow, flat_table, read_rows, write_csv
from detr.distributed import is_main
from detr.engine.run_folder import open_result_folder, write_config
from detr.telemetry.loggers import CompositeLogger
from tools.benchmark_row import measure_row
from tools.launcher import hydra_tool, resolved
from tools.override_checks import check_rows

# keys of the run of all rows, which its rows do not get
_OWN_KEYS = ("benchmark", "output_dir", "name", "only", "extra_rows", "time_limit_s", "row_timeout_s", "logger")


@hydra_tool("benchmark")
def main(cfg: DictConfig) -> None:
    if cfg.row is not None:
        row = measure_row(cfg)
        if is_main():
            Path(cfg.result).write_text(row.to_json(), encoding="utf-8")
        return
    if "shared" not in cfg.benchmark:
        raise ValueError("presets named ops_* are for tools/benchmark_ops.py; here use smoke, kernels, precision, ...")
    config = resolved(cfg)
    folder = open_result_folder(cfg.output_dir, config)
    write_config(folder, config)
    rows = _measured(cfg, folder) + [row for file in cfg.extra_rows for row in read_rows(Path(file))]
    recorded = [StepRow(repeat=0, status="recorded", **row) for row in cfg.benchmark.get("recorded", [])]
    rows += recorded
    _write_reports(cfg, rows, folder)
    if rows:
        _log_rows(cfg, rows, folder)


def _measured(cfg: DictConfig, folder: Path) -> list[StepRow]:
    """The rows of the preset, or those of `only`, measured."""
    preset = cfg.benchmark
    if cfg.only is not None and not set(cfg.only) <= set(preset.rows):
        raise ValueError(f"only={list(cfg.only)} names rows that are not there; the rows are {list(preset.rows)}")
    chosen = {name: row for name, row in preset.rows.items() if cfg.only is None or name in cfg.only}
    if not chosen:
        return []
    given = [argument for argument in sys.argv[1:] if argument.partition("=")[0].split(".")[0] not in _OWN_KEYS]
    shared = [*preset.shared, *given]
    check_rows("benchmark", {name: [*shared, *overrides] for name, overrides in chosen.items()})
    sources = [text for row in (shared, *chosen.values()) for text in row if text.startswith("data_source=")]
    if set(sources) - {"data_source=synthetic"} and cfg.data.get("root", "") is None:
        size = preset.get("jpeg_size", cfg.jpeg_size)
        root = Path(cfg.jpeg_folder) / (size if isinstance(size, str) else "x".join(map(str, size)))
        write_jpeg_dataset(root, jpeg_sizes(size, cfg.num_jpegs))
        shared.append(f"data.root={quoted_value(str(root.resolve()))}")
    return run_matrix(
        Path(__file__),
        chosen,
        shared=shared,
        repeats=preset.repeats,
        rows_file=folder / "rows.jsonl",
        num_gpus=torch.cuda.device_count(),
        row_timeout_s=cfg.row_timeout_s,
        time_limit_s=cfg.time_limit_s,
    )


def _write_reports(cfg: DictConfig, rows: list[StepRow], folder: Path) -> None:
    command = shlex.join(["python", "tools/benchmark.py", *sys.argv[1:]])
    preset = cfg.benchmark
    title = f"{HydraConfig.get().runtime.choices['benchmark']}: {cfg.name}"
    if "plain" in preset:
        report = numerics_report(
            rows,
            plain_names=preset.plain,
            notes=preset.notes,
            title=f"Numerics of {title}",
            command=command,
            picture="report.png",
        )
        plot_numerics(rows, folder / "report.png", plain_names=preset.plain, title=title)
    else:
        report = markdown_report(
            rows,
            title=f"Training step, {title}",
            command=command,
            baselines=preset.baselines,
            picture="report.png",
        )
        (folder / "kernels.md").write_text(kernel_report(rows), encoding="utf-8")
        plot_report(rows, folder / "report.png", title=title)
    (folder / "report.md").write_text(report, encoding="utf-8")
    write_csv(rows, folder / "rows.csv")
    print(report)


def _log_rows(cfg: DictConfig, rows: list[StepRow], folder: Path) -> None:
    """The table and the picture, to loggers that take them."""
    logger = CompositeLogger([*map(instantiate, cfg.logger.values())])
    columns, cells = flat_table(rows)
    logger.log_table(0, "benchmark/rows", columns, cells)
    with Image.open(folder / "report.png") as picture:
        logger.log_images(0, "benchmark/report", {"report": np.asarray(picture.convert("RGB"))})
    logger.close()


if __name__ == "__main__":
    main()
