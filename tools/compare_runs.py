"""Draw loss and AP of finished or running runs on one plot, with their AP after some minutes of training.

Keys:
  runs=FOLDERS           needed: folders of tools/train.py, as [a,b]
  at=[5,10]              minutes of training at which the table looks
  x=minutes              minutes | step
  title=Runs             of the plot

Examples:
  python tools/compare_runs.py 'runs=[outputs/a,outputs/b]'
  python tools/compare_runs.py 'runs=[outputs/a,outputs/b]' 'at=[30,60]' x=step title=Kernels

Output:
  The table on the screen; runs.md and runs.png in outputs/compare_runs (output_dir=).
"""

from pathlib import Path

from omegaconf import DictConfig

from detr.benchmark.accuracy.run_curves import format_ap_table, plot_runs, read_run_curve, run_labels
from tools.launcher import hydra_tool, require_lists


@hydra_tool("compare_runs")
def main(cfg: DictConfig) -> None:
    require_lists(cfg, {"runs": "[outputs/a,outputs/b]", "at": "[5,10]"})
    if not cfg.runs:
        raise ValueError("tools/compare_runs.py needs runs=[FOLDER,...], folders of tools/train.py; got none")
    if cfg.x not in ("minutes", "step"):
        raise ValueError(f"x must be minutes or step; got {cfg.x}")
    if any(isinstance(minute, str | bool) or minute < 0 for minute in cfg.at):
        raise ValueError(f"at= is minutes of training, as in [5,10]; got {list(cfg.at)}")
    labels = run_labels([Path(run) for run in cfg.runs])
    curves = [read_run_curve(run, label=label) for run, label in labels.items()]
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    table = format_ap_table(curves, list(cfg.at))
    (folder / "runs.md").write_text(f"# {cfg.title}\n\n{table}\n\n![{cfg.title}](runs.png)\n", encoding="utf-8")
    plot_runs(curves, folder / "runs.png", x=cfg.x, title=cfg.title)
    print(table)


if __name__ == "__main__":
    main()
