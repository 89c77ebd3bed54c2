"""Explain an average precision in one HTML page: classes, sizes, kinds of mistakes, confusions, worst images.

Keys:
  evaluation=FOLDER      needed, or detections= and annotations=: what tools/evaluate.py wrote for a checkpoint
  detections=FILE        needed, or evaluation=: a COCO result file of any detector
  annotations=FILE       needed, with detections=: the annotation file it belongs to
  images=null            folder of the validation images, for pictures of the worst
  threshold=0.3          least score of the detections whose mistakes are looked at; AP takes all
  num_worst=12           images with most mistakes

Examples:
  python tools/analyze.py evaluation=outputs/evaluate_NAME_best images=/data/coco/val2017
  python tools/analyze.py detections=found.json annotations=instances_val.json

Output:
  outputs/analyze_EVALUATION, or analyze_DETECTIONS_ANNOTATIONS (name=, output_dir=): report.html, which holds its
  pictures and opens in any browser, and analysis.json.
"""

from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig
from torch import Tensor

from detr.data import read_image
from detr.engine.run_folder import DETECTIONS, GROUND_TRUTH
from detr.evaluation import analyze_files
from detr.inference.analysis_report import write_analysis
from tools.launcher import hydra_tool
from tools.run_names import name_after_analyzed


@hydra_tool("analyze")
def main(cfg: DictConfig) -> None:
    name_after_analyzed(cfg)
    files = [cfg.detections, cfg.annotations]
    if (cfg.evaluation is None) == (None in files) or (cfg.evaluation is not None and files != [None, None]):
        raise ValueError(
            "tools/analyze.py takes evaluation=FOLDER, or detections=FILE with annotations=FILE; got "
            f"evaluation={cfg.evaluation}, detections={cfg.detections} and annotations={cfg.annotations}"
        )
    if cfg.evaluation is not None:
        files = [Path(cfg.evaluation) / DETECTIONS, Path(cfg.evaluation) / GROUND_TRUTH]
    if cfg.images is not None and not Path(cfg.images).is_dir():
        raise FileNotFoundError(f"images={cfg.images} is no folder; give the folder of the validation images")
    if cfg.evaluation is not None and not all(file.is_file() for file in files):
        raise FileNotFoundError(
            f"evaluation={cfg.evaluation} is no folder of tools/evaluate.py for a checkpoint, which has {DETECTIONS} "
            f"and {GROUND_TRUTH}; run `python tools/evaluate.py checkpoint=FILE` first, which says "
            "what folder it fills"
        )
    detections, annotations = map(Path, files)
    analysis = analyze_files(
        annotations,
        detections,
        min_score=cfg.threshold,
        max_detections=tuple(cfg.evaluator.max_detections),
        backend=cfg.evaluator.backend,
    )
    text = write_analysis(
        analysis,
        Path(cfg.output_dir),
        title=f"Detections of {cfg.evaluation or cfg.detections}",
        read=None if cfg.images is None else reader(Path(cfg.images)),
        num_worst=cfg.num_worst,
    )
    print(text)


def reader(folder: Path) -> Callable[[str], Tensor]:
    """Reads images of a folder by name."""
    return lambda name: read_image(folder / name)


if __name__ == "__main__":
    main()
