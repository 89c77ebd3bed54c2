"""Explain an average precision in one HTML page: classes, sizes, kinds of mistakes, confusions, worst images.

Keys:
  evaluation=FOLDER      needed, or detections= and annotations=: what tools/evaluate.py wrote for a checkpoint
  detections=FILE        needed, or evaluation=: a COCO result file of any detector
  annotations=FILE       needed, with detections=: the annotation file it belongs to
  images=null            folder of the validation images, for pictures of the worst
  threshold=0.3          least score of the detections whose mistakes are looked at; AP takes all
  num_worst=12           images with most mistakes

Examples:
  python tools/analyze.py evaluation=outputs/evaluate images=/data/coco/val2017
  python tools/analyze.py detections=found.json annotations=instances_val.json

Output:
  outputs/analyze (output_dir=): report.html, which holds its pictures and opens in any browser, and analysis.json.
"""

from pathlib import Path

from omegaconf import DictConfig

from detr.engine.analysis_report import write_report
from detr.engine.run_folder import DETECTIONS, GROUND_TRUTH, write_json
from detr.evaluation import analyze_files
from tools.launcher import hydra_tool


@hydra_tool("analyze")
def main(cfg: DictConfig) -> None:
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
    detections, annotations = map(Path, files)
    analysis = analyze_files(
        annotations,
        detections,
        min_score=cfg.threshold,
        max_detections=tuple(cfg.evaluator.max_detections),
        backend=cfg.evaluator.backend,
    )
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.html"
    write_json(folder / "analysis.json", analysis.to_dict())
    write_report(
        analysis,
        report,
        title=f"Detections of {cfg.evaluation or cfg.detections}",
        images=None if cfg.images is None else Path(cfg.images),
        num_worst=cfg.num_worst,
    )
    kinds = ", ".join(f"{number} {kind}" for kind, number in analysis.errors.counts().items())
    print(
        f"AP {analysis.metrics.AP:.4f}; at a score of {cfg.threshold}: {analysis.errors.num_correct} correct, {kinds}"
    )
    print(f"wrote {report}; open it in a browser")


if __name__ == "__main__":
    main()
