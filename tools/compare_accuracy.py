"""Train many configurations with several seeds, several at once, and compare their average precision.

Keys:
  accuracy=smoke         the configurations and seeds, of configs/accuracy: smoke, kernels, bccd, ...
  train=[]               keys of tools/train.py for every run, such as ["data.root=FOLDER"]
  num_parallel=1         runs at once on each GPU, of which there are gpus=1
  minutes=null           of this sitting; a run that would probably end later waits for the next; null: no limit
  only=null              configurations to run, as [a,b]; [] writes the report alone; null: all
  seeds=null             instead of the preset's, as [1,2,3]

Examples:
  python tools/compare_accuracy.py accuracy=smoke
  python tools/compare_accuracy.py accuracy=kernels 'train=["data.root=FOLDER"]' num_parallel=5 minutes=9

Output:
  outputs/compare_accuracy (output_dir=): rows.jsonl, report.md, rows.csv, curves.png and the folders of the runs. The
  same command again skips what is done and goes on.
"""

import shlex
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from detr.benchmark.accuracy.report import accuracy_report, write_accuracy_csv
from detr.benchmark.accuracy.row import AccuracyRow, read_accuracy_rows
from detr.benchmark.accuracy.run_curves import plot_runs, read_row_curves
from detr.benchmark.accuracy.runs import gpus_to_share, latest_rows, plan_runs, run_sitting
from tools.launcher import hydra_tool, require_lists
from tools.override_checks import check_rows


@hydra_tool("compare_accuracy")
def main(cfg: DictConfig) -> None:
    require_lists(cfg, {"train": '["data.root=FOLDER"]', "only": "[a,b]", "seeds": "[1,2,3]"})
    preset = cfg.accuracy
    names = list(preset.rows)
    if cfg.only is not None and not set(cfg.only) <= set(names):
        raise ValueError(f"only={list(cfg.only)} names configurations that are not there; there are {names}")
    if preset.base not in names:
        raise ValueError(f"accuracy.base={preset.base} is none of the configurations {names}")
    seeds = list(preset.seeds if cfg.seeds is None else cfg.seeds)
    specs = plan_runs(preset.rows, seeds, [*preset.shared, *map(str, cfg.train)])
    chosen = [spec for spec in specs if cfg.only is None or spec.name in cfg.only]
    check_rows("train", {spec.name: spec.overrides for spec in chosen})
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if chosen:
        run_sitting(
            Path(__file__).with_name("train.py"),
            chosen,
            folder=folder,
            num_parallel=cfg.num_parallel,
            gpus=gpus_to_share(cfg.gpus),
            minutes=cfg.minutes,
            expected_s=preset.expected_s,
            timeout_s=cfg.run_timeout_s,
            retry_failed=cfg.retry_failed,
        )
    known = latest_rows(read_accuracy_rows(folder / "rows.jsonl"), specs)
    _write_reports(cfg, [known[spec] for spec in specs if spec in known], names, seeds, folder)


def _write_reports(cfg: DictConfig, rows: list[AccuracyRow], names: list[str], seeds: list[int], folder: Path) -> None:
    preset = cfg.accuracy
    choice = HydraConfig.get().runtime.choices["accuracy"]
    curves, without_curve = read_row_curves(rows)
    report = accuracy_report(
        rows,
        names=names,
        seeds=seeds,
        base=preset.base,
        notes=preset.notes,
        title=f"Accuracy of {choice}",
        command=shlex.join(["python", "tools/compare_accuracy.py", *sys.argv[1:]]),
        picture="curves.png",
        without_curve=without_curve,
    )
    (folder / "report.md").write_text(report, encoding="utf-8")
    write_accuracy_csv(rows, folder / "rows.csv")
    plot_runs(curves, folder / "curves.png", x=preset.x, title=f"Accuracy of {choice}")
    print(report)


if __name__ == "__main__":
    main()
