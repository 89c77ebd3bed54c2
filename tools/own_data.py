"""What a run on one's own data takes from the data: queries, optimizer, and a report to read before it starts."""

import math

from hydra import compose
from omegaconf import DictConfig

from detr.data import CocoDataset, DetectionData, format_summary, summarize
from detr.distributed import is_main
from tools.run_names import chosen_keys

# COCO's fullest training image has 93 boxes, and the paper gives it 300 queries
QUERIES_PER_BOX = 3
QUERIES_STEP = 50
LEAST_QUERIES, MOST_QUERIES = 100, 900


def fit_to_data(cfg: DictConfig, data: DetectionData) -> None:
    """Print a report of both splits, and set in `cfg` what follows from them and was not chosen.

    Chosen is what stands on the command line; an experiment chooses all of it.

    Args:
        cfg: The configuration of tools/train.py with data=custom; `model.num_queries` and `optimizer` are set.
        data: What `cfg.data` made.
    """
    lines = []
    boxes_by_class = {}
    most_boxes = 0
    for split, dataset in (("train", data.train_dataset()), ("val", data.val_dataset())):
        assert isinstance(dataset, CocoDataset)
        summary = summarize(dataset.annotations)
        boxes_by_class[split] = dict(summary["boxes_by_class"])
        most_boxes = max(most_boxes, summary["max_boxes_an_image"])
        lines += [f"{split}: {dataset.annotations.path}", format_summary(summary), f"used: {dataset.counts}"]
    if cfg.data.holdout is not None:
        lines += _describe_holdout(cfg.data.holdout, boxes_by_class)
    names = ", ".join(
        f"{category_id} {name}"
        for category_id, name in zip(data.class_table.category_ids, data.class_table.names, strict=True)
    )
    lines.append(f"class ids and names, kept in checkpoints and predictions: {names}")
    chosen = chosen_keys()
    lines += [*_fit_queries(cfg, most_boxes, chosen), *_fit_optimizer(cfg, chosen)]
    if is_main():
        print("\n".join(lines), flush=True)


def num_queries_for(most_boxes: int) -> int:
    """Queries for a dataset whose fullest image has `most_boxes` boxes."""
    wished = math.ceil(most_boxes * QUERIES_PER_BOX / QUERIES_STEP) * QUERIES_STEP
    return max(min(max(wished, LEAST_QUERIES), MOST_QUERIES), most_boxes)


def _describe_holdout(holdout: float, boxes_by_class: dict[str, dict[str, int]]) -> list[str]:
    """What was held out, and the classes of which one of the splits has no box."""
    lines = [f"data.holdout={holdout}: val is held out of train, always the same images, chosen by class and file name"]
    for split, other in (("train", "val"), ("val", "train")):
        absent = [name for name, count in boxes_by_class[other].items() if count and not boxes_by_class[split][name]]
        if absent:
            lines.append(f"classes of {other} without a box in {split}: {', '.join(absent)}")
    return lines


def _fit_queries(cfg: DictConfig, most_boxes: int, chosen: set[str]) -> list[str]:
    if chosen & {"model.num_queries", "experiment"}:
        too_few = cfg.model.num_queries < most_boxes
        return [f"model.num_queries={cfg.model.num_queries}, but an image has {most_boxes} boxes"] if too_few else []
    if cfg.init_from is not None:
        return [f"model.num_queries={cfg.model.num_queries}, which init_from must have too"]
    cfg.model.num_queries = num_queries_for(most_boxes)
    return [f"model.num_queries={cfg.model.num_queries}: at most {most_boxes} boxes in an image"]


def _fit_optimizer(cfg: DictConfig, chosen: set[str]) -> list[str]:
    if any(key == "experiment" or key.split(".")[0] == "optimizer" for key in chosen):
        return []
    has_weights = cfg.init_from is not None or cfg.backbone.pretrained is not False
    name = "adamw" if has_weights else "adamw_scratch"
    cfg.optimizer = compose("train", [f"optimizer={name}"]).optimizer
    why = "weights are loaded" if has_weights else "it starts from random weights"
    return [f"optimizer={name}: lr {cfg.optimizer.lr:g} at {cfg.optimizer.base_batch} images a step, since {why}"]
