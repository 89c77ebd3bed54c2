"""Measure the data pipeline on photos that it writes itself; needs neither data nor a GPU.

Keys:
  parts=[speed,padding,memory]   what to measure
  workers=[2]                    worker processes to time the loader with; [] times one core only
  batch_size=2                   images a batch of the loader
  num_photos=200                 JPEGs to write
  sizes=null                     COCO file whose image sizes are padded; null: those of 121 COCO photos

Examples:
  python tools/benchmark_data.py
  python tools/benchmark_data.py 'parts=[speed]' 'workers=[16]' batch_size=16

Output:
  A table on the screen and in outputs/benchmark_data/data.md (output_dir=).
"""

from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from detr.benchmark.data.memory import many_annotations_dataset, measure_memory
from detr.benchmark.data.padding import coco_like_sizes, measure_padding
from detr.benchmark.data.report import memory_section, padding_section, speed_section
from detr.benchmark.data.speed import measure_core, measure_loader, recipe_dataset, write_photos
from detr.data import Sampling, load_coco_annotations
from detr.telemetry.environment import collect_environment, format_environment
from tools.launcher import hydra_tool

BATCH_SIZES = (2, 4, 8, 16)
SAMPLINGS = (
    Sampling(),
    Sampling(group_by_aspect=True),
    Sampling(one_scale_a_batch=True),
    Sampling(group_by_aspect=True, one_scale_a_batch=True),
)


@hydra_tool("benchmark_data")
def main(cfg: DictConfig) -> None:
    unknown = set(cfg.parts) - {"speed", "padding", "memory"}
    if unknown:
        raise ValueError(f"parts are speed, padding and memory; got {sorted(unknown)}")
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    sections = ["# Data pipeline", "```\n" + format_environment(collect_environment(), {}) + "\n```"]
    if "speed" in cfg.parts:
        sections.append(measure_speed_part(cfg, folder))
    if "padding" in cfg.parts:
        sections.append(measure_padding_part(cfg))
    if "memory" in cfg.parts:
        dataset = many_annotations_dataset(folder / "many", cfg.memory_annotations)
        use = measure_memory(dataset, num_workers=cfg.memory_workers)
        sections.append(memory_section(use, num_workers=cfg.memory_workers, num_annotations=cfg.memory_annotations))
    text = "\n\n".join(sections) + "\n"
    (folder / "data.md").write_text(text, encoding="utf-8")
    print(text, flush=True)


def measure_speed_part(cfg: DictConfig, folder: Path) -> str:
    """One core against Pillow's pipeline, then the loader with each number of workers."""
    dataset = recipe_dataset(write_photos(folder / "photos", [(480, 640)] * cfg.num_photos))
    core = measure_core(dataset, num_rounds=cfg.num_rounds)
    workers = {
        int(count): measure_loader(
            dataset,
            num_workers=int(count),
            batch_size=cfg.batch_size,
            pin_memory=cfg.pin_memory,
            num_images=cfg.loader_images,
        )
        for count in cfg.workers
    }
    return speed_section(core, workers)


def measure_padding_part(cfg: DictConfig) -> str:
    """Every batch size with each kind of sampling."""
    num_images = max(BATCH_SIZES) * cfg.num_batches
    if cfg.sizes is None:
        sizes, name = coco_like_sizes(num_images), "images of the sizes of 121 COCO photos"
    else:
        known = load_coco_annotations(cfg.sizes, need_annotations=False).image_sizes
        known = known[known[:, 0] > 0]
        if len(known) == 0:
            raise ValueError(f"sizes={cfg.sizes} gives no width and height. Use a file that does")
        sizes = known[np.random.default_rng(0).integers(0, len(known), num_images)]
        name = f"images of the sizes in {Path(cfg.sizes).name}"
    rows = [
        row
        for batch_size in BATCH_SIZES
        for sampling in SAMPLINGS
        for row in measure_padding(
            sizes, batch_size=batch_size, sampling=sampling, pad_to=tuple(cfg.pad_to), num_batches=cfg.num_batches
        )
    ]
    return padding_section(rows, sizes_of=name)


if __name__ == "__main__":
    main()
