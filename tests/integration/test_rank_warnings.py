"""Two ranks under torchrun: what both meet alike is said once, what one may meet alone is said with its number."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

NUM_IMAGES = 8


def write_split(folder: Path) -> None:
    """Images of three boxes, and an annotation that nothing can be made of."""
    folder.mkdir(parents=True)
    for number in range(NUM_IMAGES):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    annotations = [
        {"id": 3 * number + box + 1, "image_id": number, "category_id": 1, "bbox": [8 * box, 4, 30, 30]}
        for number in range(NUM_IMAGES)
        for box in range(3)
    ]
    annotations.append({"id": 900, "image_id": 0, "category_id": 77, "bbox": [1, 1, 2, 2]})
    images = [{"id": i, "file_name": f"{i}.png", "width": 64, "height": 64} for i in range(NUM_IMAGES)]
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "a"}]}
    (folder / "_annotations.coco.json").write_text(json.dumps(content))


def test_ranks_say_once_what_they_meet_alike(tmp_path: Path, run_script: Callable[..., Any], repository: Path):
    for split in ("train", "val"):
        write_split(tmp_path / "d" / split)
    # a file that is no image is left out on every rank
    (tmp_path / "d/train/7.png").write_bytes(b"broken")
    finished = run_script(
        repository / "tools" / "train.py",
        *("data=custom", "data.root=d", "device=cpu", "schedule.epochs=1"),
        *("data.num_workers=0", "data.batch_size=2", "transforms=fixed", "transforms.eval.size=[64,64]"),
        *("data.faulty_annotations=drop", "data.faulty_images=skip", "model.num_queries=2"),
        *("backbone.name=test_vit", "backbone.freeze=[]", "+backbone.timm_args.dynamic_img_size=true"),
        ranks=2,
        cwd=tmp_path,
        timeout_s=200,
    )
    lines = finished.stdout.splitlines()
    for warning in ("1 faulty entries dropped", "1 of 8 images skipped", "levels of test_vit share a stride"):
        assert warning in finished.stdout
    # both splits have the faulty annotation
    twice = [line for line, count in Counter(lines).items() if count > 1 and "annotation 900" not in line]
    assert twice == []
    assert finished.stdout.count("annotation 900") == 2
    crowded = sorted(line.split(" image ")[0] for line in lines if "the model has 2 queries" in line)
    assert crowded == ["rank 0:", "rank 1:"]
