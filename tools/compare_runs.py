"""Loss and AP of finished or running runs on one plot, and AP after some minutes of training.

    python tools/compare_runs.py 'runs=[outputs/a,outputs/b]' 'at=[5,10]'

Writes runs.md and runs.png to `output_dir`. The keys are those of configs/compare_runs.yaml.
"""

from pathlib import Path

from omegaconf import DictConfig

from detr.benchmark.run_curves import format_ap_table, plot_runs, read_run_curve
from tools.launcher import hydra_tool


@hydra_tool("compare_runs")
def main(cfg: DictConfig) -> None:
    if not cfg.runs:
        raise ValueError("tools/compare_runs.py needs runs=[FOLDER,...], folders of tools/train.py; got none")
    if cfg.x not in ("minutes", "step"):
        raise ValueError(f"x must be minutes or step; got {cfg.x}")
    curves = [read_run_curve(Path(run)) for run in cfg.runs]
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    table = format_ap_table(curves, list(cfg.at))
    (folder / "runs.md").write_text(f"# {cfg.title}\n\n{table}\n\n![{cfg.title}](runs.png)\n", encoding="utf-8")
    plot_runs(curves, folder / "runs.png", x=cfg.x, title=cfg.title)
    print(table)


if __name__ == "__main__":
    main()
