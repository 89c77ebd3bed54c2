"""Detect objects on images with a trained checkpoint.

Keys:
  checkpoint=FILE        needed: best.pt of a run, or a file of tools/import_weights.py
  source=IMAGES          needed: an image, a folder, a quoted pattern, or a video
  threshold=0.3          least score of what is written and drawn
  classes=null           names to keep, as [person,dog]; null keeps all
  batch_size=1           images at once
  draw=true              write the images with their boxes

Examples:
  python tools/predict.py checkpoint=outputs/NAME/best.pt source=photos/
  python tools/predict.py checkpoint=outputs/NAME/best.pt source='photos/*.jpg' 'classes=[person,dog]' batch_size=8
  python tools/predict.py checkpoint=outputs/NAME/best.pt source=clip.mp4 video_fps=5

Output:
  outputs/predict_SOURCE (name=, output_dir=), SOURCE being the name of the folder, image or video: predictions.json
  (COCO result format, with names), images.json (image ids, and the files that could not be read) and the drawn images,
  or the drawn video. A bad file is reported and skipped. Results of other settings are not overwritten.
"""

from collections.abc import Iterable
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from detr.engine.checkpoint import load_checkpoint
from detr.engine.run_folder import PREDICTIONS, open_result_folder, write_config
from detr.evaluation import PostProcess
from detr.inference.image_sources import Skipped, SourceImage, find_images, is_video, read_images, require_other_folder
from detr.inference.predict import class_labels, predict
from detr.inference.prediction_files import IMAGES, write_predictions
from detr.inference.video import VideoInfo, read_frames, video_info
from detr.telemetry.loggers import ConsoleLogger
from tools.launcher import hydra_tool, print_start, resolved, start_process
from tools.run_names import name_after_source
from tools.saved_model import build_detector


@hydra_tool("predict")
def main(cfg: DictConfig) -> None:
    name_after_source(cfg)
    config = resolved(cfg)
    if cfg.checkpoint is None or cfg.source is None:
        raise ValueError(
            "tools/predict.py needs checkpoint=FILE and source=IMAGE, source=FOLDER or source=VIDEO; got "
            f"checkpoint={cfg.checkpoint} and source={cfg.source}"
        )
    if cfg.video_fps is not None and not cfg.video_fps > 0:
        raise ValueError(f"video_fps must be above 0, or null for every frame; got {cfg.video_fps}")
    if cfg.top_k < 1 or cfg.batch_size < 1:
        raise ValueError(f"top_k and batch_size must be at least 1; got {cfg.top_k} and {cfg.batch_size}")
    if not 0 <= cfg.threshold <= 1:
        raise ValueError(f"threshold is a score in [0, 1], such as 0.3 for 30%; got {cfg.threshold}")
    context = start_process(cfg)
    source = Path(cfg.source).expanduser()
    video = video_info(source) if is_video(cfg.source) else None
    paths = [source] if video is not None else find_images(cfg.source)
    checkpoint = load_checkpoint(cfg.checkpoint)
    names = checkpoint.class_table.names
    wanted = [cfg.classes] if isinstance(cfg.classes, str) else cfg.classes
    labels = None if wanted is None else class_labels(names, [str(name) for name in wanted])
    # what is wrong with the inputs comes first
    folder = open_result_folder(cfg.output_dir, config)
    require_other_folder(folder, paths)
    precision = instantiate(cfg.precision)
    precision.prepare(context.device)
    model = build_detector(checkpoint, kernel=cfg.kernel, source=cfg.checkpoint, device=context.device)
    images = len(paths) if video is None else f"{video.num_frames or 'unknown'} frames at {video.fps:.4g} a second"
    print_start(cfg, context, checkpoint=cfg.checkpoint, images=images, output=folder)

    write_config(folder, config)
    skipped: list[Skipped] = []
    predictions = predict(
        model,
        read_source(cfg, paths, video, apply_exif=checkpoint.preprocessing["apply_exif"], skipped=skipped),
        PostProcess(cfg.top_k),
        preprocessing=checkpoint.preprocessing,
        min_score=cfg.threshold,
        batch_size=cfg.batch_size,
        precision=precision,
        device=context.device,
        labels=labels,
        max_size=cfg.max_size,
        skipped=skipped,
    )
    num_images, num_detections = write_predictions(
        predictions,
        folder,
        checkpoint.class_table,
        draw=cfg.draw,
        skipped=skipped,
        video_fps=25.0 if video is None else drawn_fps(cfg, video),
    )
    print(f"{folder / PREDICTIONS}: {num_detections} detections of at least {cfg.threshold} on {num_images} images")
    if skipped:
        print(f"{len(skipped)} files were left out, first {skipped[0].path}; {folder / IMAGES} says why")


def read_source(
    cfg: DictConfig, paths: list[Path], video: VideoInfo | None, *, apply_exif: bool, skipped: list[Skipped]
) -> Iterable[SourceImage]:
    """The images, with a progress bar."""
    console = ConsoleLogger()
    if video is None:
        return read_images(console.track(paths, "predict"), apply_exif=apply_exif, skipped=skipped)
    num_frames = round(video.num_frames * drawn_fps(cfg, video) / video.fps)
    frames = read_frames(paths[0], fps=cfg.video_fps, skipped=skipped)
    return console.track(frames, "predict", num_items=num_frames or None)


def drawn_fps(cfg: DictConfig, video: VideoInfo) -> float:
    """Frames a second that are looked at and drawn."""
    return video.fps if cfg.video_fps is None else min(float(cfg.video_fps), video.fps)


if __name__ == "__main__":
    main()
