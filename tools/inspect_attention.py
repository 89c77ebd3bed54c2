"""Show where a trained model's attention looks: statistics over images, and the samples of one query drawn.

Keys:
  checkpoint=FILE        needed: best.pt of a run, or a file of tools/import_weights.py
  source=IMAGES          needed: an image, a folder, or a quoted pattern
  layer=null             the layer to draw, such as encoder.layers.0; null: the last decoder layer
  query=null             the query to draw; null: the one with the best score
  num_images=100         of the source, for the statistics
  num_drawn=4            images to draw on

Examples:
  python tools/inspect_attention.py checkpoint=outputs/NAME/best.pt source=photos/
  python tools/inspect_attention.py checkpoint=outputs/NAME/best.pt source=photo.jpg layer=encoder.layers.0 query=120

Output:
  outputs/inspect_attention_NAME_best_SOURCE (name=, output_dir=): sampling.json and sampling.md (how far samples lie
  from what their query looks at, by layer, level and head, in cells of the level and pixels of the resized image) and
  pictures, named after layer and query; the table over all heads on the screen. Statistics of other images, weights or
  settings are not overwritten.
"""

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor

from detr.data import EvalTransform, read_image
from detr.engine.checkpoint import load_checkpoint
from detr.engine.run_folder import SAMPLING, open_result_folder, write_config, write_json
from detr.inference.image_sources import find_images
from detr.inference.predict import detection_batch
from detr.inference.sampling_picture import draw_sampling
from detr.inference.sampling_stats import SamplingStats, format_sampling, sampling_tables
from detr.models.sampling import LayerSampling, level_strides, record_sampling
from detr.telemetry.loggers import ConsoleLogger
from tools.launcher import hydra_tool, print_start, resolved, start_process
from tools.run_names import name_after_checkpoint_and_source
from tools.saved_model import build_detector

# of the pictures alone, which are named after them: others go beside them
_PICTURE_KEYS = ("layer", "query", "num_drawn")


@hydra_tool("inspect_attention")
def main(cfg: DictConfig) -> None:
    name_after_checkpoint_and_source(cfg)
    if cfg.checkpoint is None or cfg.source is None:
        raise ValueError(
            "tools/inspect_attention.py needs checkpoint=FILE and source=IMAGES; got "
            f"checkpoint={cfg.checkpoint} and source={cfg.source}"
        )
    context = start_process(cfg)
    config = {key: value for key, value in resolved(cfg).items() if key not in _PICTURE_KEYS}
    folder = open_result_folder(cfg.output_dir, config)
    paths = find_images(cfg.source)[: cfg.num_images]
    checkpoint = load_checkpoint(cfg.checkpoint)
    precision = instantiate(cfg.precision)
    precision.prepare(context.device)
    model = build_detector(checkpoint, kernel=cfg.kernel, source=cfg.checkpoint, device=context.device)
    print_start(cfg, context, checkpoint=cfg.checkpoint, images=len(paths), output=folder)
    write_config(folder, config)

    resize = EvalTransform(**checkpoint.preprocessing["resize"])
    stats = SamplingStats()
    num_read = 0
    for path in ConsoleLogger().track(paths, "inspect"):
        try:
            image = read_image(path, apply_exif=checkpoint.preprocessing["apply_exif"])
        except (ValueError, OSError) as error:
            print(f"left out {path}: {error}")
            continue
        batch = detection_batch([image], resize, pad_to=checkpoint.preprocessing["pad_to"]).to(context.device)
        with torch.no_grad(), precision.autocast(context.device), record_sampling(model) as layers:
            output = model(batch.images)
        stats.add(layers)
        if num_read < cfg.num_drawn:
            layer = find_layer(layers, cfg.layer)
            query = chosen_query(layer, output.pred_logits) if cfg.query is None else cfg.query
            picture = draw_sampling(image, layer, image_index=0, query=query)
            picture.save(folder / f"{num_read:03}_{path.stem}_{layer.name}_query_{query}.png")
        num_read += 1
    rows = stats.rows(level_strides(model))
    write_json(folder / SAMPLING, {"checkpoint": str(cfg.checkpoint), "num_images": num_read, "rows": rows})
    (folder / "sampling.md").write_text(
        f"# Where attention samples: {num_read} images\n\n{sampling_tables(rows)}\n", encoding="utf-8"
    )
    print(format_sampling(rows))
    print(f"wrote {folder / 'sampling.json'}, {num_read} images")


def find_layer(layers: list[LayerSampling], name: str | None) -> LayerSampling:
    """The layer of that name, or the last."""
    if name is None:
        return layers[-1]
    for layer in layers:
        if layer.name == name:
            return layer
    raise ValueError(f"layer={name} is none of {', '.join(layer.name for layer in layers)}")


def chosen_query(layer: LayerSampling, logits: Tensor) -> int:
    """The decoder query with the best score; in the encoder the middle cell of the finest level."""
    if layer.name.startswith("decoder"):
        return int(logits[0].amax(-1).argmax())
    H, W = layer.spatial_shapes[0]
    return H // 2 * W + W // 2


if __name__ == "__main__":
    main()
