"""Where the average precision comes from, as one HTML page.

    python tools/evaluate.py checkpoint=outputs/NAME/best.pt
    python tools/analyze.py evaluation=outputs/evaluate images=FOLDER_OF_THE_VALIDATION_IMAGES

Writes report.html (one file: numbers by class and size, precision over recall, kinds of mistakes, confusion matrix, the
images with most mistakes) and analysis.json to `output_dir`. The keys are those of configs/analyze.yaml.
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
