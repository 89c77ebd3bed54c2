"""Say what is wrong with a dataset before you train on it.

Keys:
  data.root=FOLDER             needed, or data.val.annotations=: COCO, Roboflow, YOLO or Pascal VOC layout
  data.val.annotations=FILE    needed, or data.root=: a COCO file, with data.val.images= its images too; train likewise
  data.holdout=null            0.1 for data without a validation split, as in training
  num_queries=300              of the model; images with more boxes are named
  num_threads=4                images decoded at once
  report=null                  JSON file; null: report.json in output_dir

Examples:
  python tools/check_dataset.py data.root=photos
  python tools/check_dataset.py data.val.annotations=instances_val.json data.val.images=val

Output:
  Every fault with its file and annotation, and what is done about it, on the screen and in
  outputs/check_dataset/report.json (output_dir=). Exit code 0: nothing, or notes only. 1: something is dropped,
  guessed, repaired, missing or over a limit. 2: a file cannot be used.
"""

import sys
from pathlib import Path

from omegaconf import DictConfig

from detr.data import (
    SplitReport,
    SplitSource,
    check_split,
    find_own_split,
    find_parts,
    format_faults,
    format_summary,
)
from detr.engine.run_folder import write_json
from tools.launcher import hydra_tool


@hydra_tool("check_dataset", error_code=2)
def main(cfg: DictConfig) -> None:
    sources = find_sources(cfg)
    reports = {}
    for split, (source, with_images) in sources.items():
        other = next((each for name, (each, _) in sources.items() if name != split), None)
        reports[split] = check_split(
            source,
            other=other,
            with_images=with_images,
            apply_exif=cfg.data.apply_exif,
            num_queries=cfg.num_queries,
            num_threads=cfg.num_threads,
        )
        print_report(split, reports[split], with_images=with_images)
    code = max(report.exit_code for report in reports.values())
    path = Path(cfg.report or Path(cfg.output_dir) / "report.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"exit_code": code, "splits": {name: report.to_dict() for name, report in reports.items()}})
    num_faults = sum(fault.severity != "note" for report in reports.values() for fault in report.faults)
    num_notes = sum(len(report.faults) for report in reports.values()) - num_faults
    print(f"{path}: {num_faults} faults, {num_notes} notes, exit code {code}", flush=True)
    sys.exit(code)


def find_sources(cfg: DictConfig) -> dict[str, tuple[SplitSource, bool]]:
    """The splits to check, and whether their images are known.

    Raises:
        ValueError: Nothing is given.
    """
    sources: dict[str, tuple[SplitSource, bool]] = {}
    # other data than `custom` has none
    holdout = cfg.data.get("holdout")
    places = {"root": cfg.data.root, "train": cfg.data.train, "val": cfg.data.val}
    for split in ("train", "val") if holdout is None else ("train",):
        given = cfg.data[split]
        if given.annotations is not None or cfg.data.root is not None:
            with_images = given.images is not None or cfg.data.root is not None
            if holdout is None:
                found = {split: find_own_split(split, **places, with_images=with_images)}
            else:
                found = find_parts(**places, holdout=holdout, with_images=with_images)
            sources |= {name: (source, with_images) for name, source in found.items()}
    if not sources:
        raise ValueError("what is to be checked? Set data.root=DIR, or data.val.annotations=FILE data.val.images=DIR")
    return sources


def print_report(split: str, report: SplitReport, *, with_images: bool) -> None:
    """The report of a split for people."""
    print(f"{split}: {report.source}")
    print(format_summary(report.summary))
    if not with_images:
        print("images not checked: no image folder is given")
    print(format_faults(report.faults) or "nothing found", flush=True)


if __name__ == "__main__":
    main()
