"""Run by test_two_ranks under torchrun: evaluates one set of detections, split over the ranks in several ways."""

import json
import sys
from pathlib import Path

import torch

from detr.distributed import cleanup, init_distributed
from detr.evaluation import CocoEvaluator
from detr.structures import ClassTable, Detections

NUM_IMAGES = 21
TABLE = ClassTable(names=("cat", "dog"), category_ids=(3, 8))


def make_image(image_id: int) -> tuple[list[dict[str, object]], Detections]:
    """The annotations of an image, some images having none, and detections of varying quality."""
    generator = torch.Generator().manual_seed(image_id)
    T = image_id % 4
    sides = torch.rand(T, 2, generator=generator) * 80 + 10
    corners = torch.rand(T, 2, generator=generator) * 200
    labels = torch.randint(0, 2, (T,), generator=generator)
    annotations: list[dict[str, object]] = [
        {
            "id": 10 * image_id + index,
            "image_id": image_id,
            "category_id": TABLE.category_ids[int(labels[index])],
            "bbox": [*corners[index].tolist(), *sides[index].tolist()],
        }
        for index in range(T)
    ]
    truth = torch.cat([corners, corners + sides], dim=1)
    boxes = torch.cat([truth + torch.randn(T, 4, generator=generator) * 6, torch.tensor([[0.0, 0, 30, 30]])])
    scores = torch.rand(T + 1, generator=generator)
    return annotations, Detections(scores, torch.cat([labels, torch.zeros(1, dtype=torch.int64)]), boxes)


def main(output_dir: Path) -> None:
    context = init_distributed("cpu")
    images = [make_image(image_id) for image_id in range(NUM_IMAGES)]
    evaluator = CocoEvaluator(
        {
            "images": [{"id": image_id} for image_id in range(NUM_IMAGES)],
            "categories": [{"id": 3, "name": "cat"}, {"id": 8, "name": "dog"}],
            "annotations": [annotation for annotations, _ in images for annotation in annotations],
        },
        TABLE,
    )
    everything = list(range(NUM_IMAGES))
    strided = everything[context.rank :: context.world_size]
    splits = {
        "unpadded": strided,
        # as DistributedSampler does it: the last rank sees image 0 again
        "padded": strided + [0] * (context.world_size > 1 and context.rank == context.world_size - 1),
        "one rank has all": everything if context.rank == 0 else [],
        "nobody has any": [],
    }
    report = {}
    for name, image_ids in splits.items():
        evaluator.reset()
        evaluator.update(image_ids, [images[image_id][1] for image_id in image_ids])
        gathered = evaluator.gather_results()
        report[name] = {
            "images": len({result["image_id"] for result in gathered}),
            "detections": len(gathered),
            "metrics": evaluator.summarize().to_dict(),
        }
    (output_dir / f"rank{context.rank}_of_{context.world_size}.json").write_text(json.dumps(report))
    cleanup()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
