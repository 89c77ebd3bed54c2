"""Say how far the gradients of kernel configurations are from float64, at checkpoints along a run.

The same training batch, weights and matches for all; no dropout, uncompiled. Float64 runs in the reference kernel. What
an accumulator does beside the rounding of everything else shows in the pairs, whose rows say "A from B".

Keys:
  checkpoints=FILES      needed: of one run, as [outputs/NAME/step_00000100.pt,outputs/NAME/last.pt]
  only=null              rows to measure, as [a,b]; null: all
  seed=42                of the batch: which images, and their augmentation
  device=auto            auto, cpu, cuda or cuda:N

Examples:
  python tools/compare_gradients.py 'checkpoints=[outputs/NAME/last.pt]'
  python tools/compare_gradients.py 'checkpoints=[outputs/NAME/last.pt]' 'only=[reference_bf16]' device=cpu

Output:
  outputs/compare_gradients (output_dir=): gradients.md, gradients.png (a panel a quantity) and gradients.json; the
  table on the screen.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from detr.benchmark.accuracy.gradient_report import GradientRow, gradient_table, gradient_values, plot_gradients
from detr.benchmark.accuracy.gradients import FirstMatches, ModelGradients, gradient_distances, model_gradients
from detr.engine.checkpoint import Checkpoint, load_checkpoint
from detr.engine.precision import Precision
from detr.engine.run_folder import write_json
from detr.inference.saved_model import build_saved_detector
from detr.losses import SetCriterion
from detr.models import DeformableDETR
from detr.structures import Batch
from detr.telemetry.environment import collect_environment, format_environment
from ops import BackendUnavailable, KernelConfig
from tools.launcher import hydra_tool, require_lists, start_process
from tools.saved_model import data_config


@hydra_tool("compare_gradients")
def main(cfg: DictConfig) -> None:
    require_lists(cfg, {"checkpoints": "[outputs/NAME/last.pt]", "only": "[a,b]", "pairs": "[[a,b]]"})
    if not cfg.checkpoints:
        raise ValueError("tools/compare_gradients.py needs checkpoints=[FILE,...] of tools/train.py; got none")
    context = start_process(cfg)
    environment = collect_environment()
    print(format_environment(environment, {"device": context.device}), flush=True)
    if cfg.only is not None and not set(cfg.only) <= set(cfg.rows):
        raise ValueError(f"only={list(cfg.only)} names rows that are not there; the rows are {list(cfg.rows)}")
    unknown = sorted({str(name) for pair in cfg.pairs for name in pair} - set(cfg.rows))
    if unknown or any(len(pair) != 2 for pair in cfg.pairs):
        raise ValueError(f"pairs= are pairs of rows, as in [[a,b]]; the rows are {list(cfg.rows)}; got {cfg.pairs}")
    settings = {name: dict(row) for name, row in cfg.rows.items() if cfg.only is None or name in cfg.only}
    require_one_model(cfg.checkpoints)
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[GradientRow] = []
    batch: Batch | None = None
    for path in cfg.checkpoints:
        # the weights that are trained, not their average
        checkpoint = dataclasses.replace(load_checkpoint(path), ema=None)
        if batch is None:
            cfg.checkpoint = path
            data = instantiate(data_config(cfg, checkpoint))
            batch = next(iter(data.train_loader(seed=cfg.seed)))
        num_classes = checkpoint.class_table.num_classes
        criterion = instantiate(cfg.criterion, num_classes=num_classes).to(context.device)
        for row in compare_at(checkpoint, path, settings, cfg.pairs, criterion, batch, context.device):
            rows.append(row)
            print(f"{path}: {row.name}: {row.status}", flush=True)
        # after each: float64 takes its time, and what is measured is kept if the rest is cut short
        write_report(rows, environment, folder)
    print(gradient_table(rows))


def require_one_model(paths: Sequence[str]) -> None:
    """Refuse checkpoints that one table cannot hold, before hours of float64.

    Raises:
        ValueError: Of other classes or another model than the first, or of a step that was there before.
    """
    first: Checkpoint | None = None
    path_of: dict[int, str] = {}
    for path in paths:
        checkpoint = load_checkpoint(path)
        first = first or checkpoint
        for what in ("classes", "model", "backbone"):
            if _part(checkpoint, what) != _part(first, what):
                raise ValueError(
                    f"{path} differs from {paths[0]} in its {what}; give checkpoints of one run, and those of another "
                    "to a command of its own, with another name="
                )
        step = checkpoint.global_step
        if step in path_of:
            raise ValueError(f"{path} is of step {step}, as {path_of[step]} is; leave one of them out")
        path_of[step] = path


def _part(checkpoint: Checkpoint, what: str) -> object:
    return checkpoint.class_table if what == "classes" else checkpoint.config.get(what)


def write_report(rows: Sequence[GradientRow], environment: dict[str, Any], folder: Path) -> None:
    """Table, plot and numbers of the checkpoints so far."""
    (folder / "gradients.md").write_text(
        f"# Gradients against float64\n\n```\n{format_environment(environment)}\n```\n\n"
        "Norm of the difference over the norm of the float64 gradient, one batch.\n\n"
        f"{gradient_table(rows)}\n\n![Gradients](gradients.png)\n",
        encoding="utf-8",
    )
    content = {"environment": environment, "rows": gradient_values(rows)}
    write_json(folder / "gradients.json", content)
    plot_gradients(rows, folder / "gradients.png", title="Distance of gradients from float64")


def compare_at(
    checkpoint: Checkpoint,
    path: str,
    settings: dict[str, dict[str, Any]],
    pairs: Sequence[Sequence[str]],
    criterion: SetCriterion,
    batch: Batch,
    device: torch.device,
) -> list[GradientRow]:
    """Every configuration at one checkpoint, then the pairs that ran; one that cannot run here says so."""
    criterion.matcher = FirstMatches(criterion.matcher)

    def build(kernel: KernelConfig) -> DeformableDETR:
        return cast(DeformableDETR, build_saved_detector(checkpoint, source=path, device=device, kernel=kernel))

    exact = model_gradients(
        build(KernelConfig("reference")).double(), criterion, batch, precision=Precision("fp32"), device=device
    )
    rows: list[GradientRow] = []
    ran: dict[str, ModelGradients] = {}
    for name, setting in settings.items():
        kernel = {key: value for key, value in setting.items() if key != "precision"}
        precision = Precision(setting["precision"])
        row = GradientRow(checkpoint.global_step, name, None, exact.loss, ())
        try:
            found = model_gradients(
                build(KernelConfig(**kernel)),
                criterion,
                batch,
                precision=precision,
                device=device,
            )
        except (BackendUnavailable, ValueError) as error:
            rows.append(dataclasses.replace(row, status=str(error).splitlines()[0]))
        else:
            distances = tuple(gradient_distances(found, exact))
            rows.append(dataclasses.replace(row, loss=found.loss, distances=distances))
            ran[name] = found
    for one, other in pairs:
        if one in ran and other in ran:
            distances = tuple(gradient_distances(ran[one], ran[other]))
            name = f"{one} from {other}"
            rows.append(GradientRow(checkpoint.global_step, name, ran[one].loss, ran[other].loss, distances))
    return rows


if __name__ == "__main__":
    main()
