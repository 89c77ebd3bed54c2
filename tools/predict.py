"""Detect objects on images with a trained checkpoint.

Keys:
  checkpoint=FILE        needed: best.pt of a run, or a file of tools/import_weights.py
  source=IMAGES          needed: an image, a folder, or a quoted pattern
  threshold=0.3          least score of what is written and drawn
  classes=null           names to keep, as [person,dog]; null keeps all
  batch_size=1           images at once
  draw=true              write the images with their boxes

Examples:
  python tools/predict.py checkpoint=outputs/NAME/best.pt source=photos/
  python tools/predict.py checkpoint=outputs/NAME/best.pt source='photos/**/*.jpg' classes=[person,dog] batch_size=8

Output:
  outputs/predict (output_dir=): predictions.json (COCO result format, with names), images.json (image ids, and the
  files that could not be read) and the drawn images. A bad file is reported and skipped.
"""

from hydra.utils import instantiate
from omegaconf import DictConfig

from detr.engine.checkpoint import load_checkpoint
from detr.engine.predict import (
    IMAGES,
    Skipped,
    class_labels,
    find_images,
    predict,
    require_other_folder,
    write_predictions,
)
from detr.engine.run_folder import PREDICTIONS, open_result_folder, write_config
from detr.evaluation import PostProcess
from detr.telemetry.loggers import ConsoleLogger
from tools.launcher import hydra_tool, print_start, resolved, start_process
from tools.saved_model import build_detector


@hydra_tool("predict")
def main(cfg: DictConfig) -> None:
    config = resolved(cfg)
    if cfg.checkpoint is None or cfg.source is None:
        raise ValueError(
            "tools/predict.py needs checkpoint=FILE and source=IMAGE or source=FOLDER; got "
            f"checkpoint={cfg.checkpoint} and source={cfg.source}"
        )
    folder = open_result_folder(cfg.output_dir, config)
    context = start_process(cfg)
    paths = find_images(cfg.source)
    require_other_folder(folder, paths)
    checkpoint = load_checkpoint(cfg.checkpoint)
    precision = instantiate(cfg.precision)
    precision.prepare(context.device)
    model = build_detector(checkpoint, kernel=cfg.kernel, source=cfg.checkpoint, device=context.device)
    names = checkpoint.class_table.names
    labels = None if cfg.classes is None else class_labels(names, [str(name) for name in cfg.classes])
    print_start(cfg, context, checkpoint=cfg.checkpoint, images=len(paths), output=folder)

    write_config(folder, config)
    skipped: list[Skipped] = []
    predictions = predict(
        model,
        ConsoleLogger().track(paths, "predict"),
        PostProcess(cfg.top_k),
        preprocessing=checkpoint.preprocessing,
        min_score=cfg.threshold,
        batch_size=cfg.batch_size,
        precision=precision,
        device=context.device,
        labels=labels,
        skipped=skipped,
    )
    num_images, num_detections = write_predictions(
        predictions, folder, checkpoint.class_table, draw=cfg.draw, skipped=skipped
    )
    print(f"{folder / PREDICTIONS}: {num_detections} detections of at least {cfg.threshold} on {num_images} images")
    if skipped:
        print(f"{len(skipped)} files were left out, first {skipped[0].path}; {folder / IMAGES} says why")


if __name__ == "__main__":
    main()
