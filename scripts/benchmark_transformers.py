"""A live anchor for the step benchmark: the same step with Hugging Face transformers' Deformable DETR.

    python scripts/benchmark_transformers.py --batch-size 16 --output outputs/transformers.jsonl
    python tools/benchmark.py benchmark=batches 'extra_rows=[outputs/transformers.jsonl]'

Needs the transformers package, which nothing else here uses. The model is built from its configuration with random
weights: ResNet-50 through timm, box refinement, auxiliary losses, 300 queries, 91 classes. Batches, timing, clip and
fused AdamW are those of tools/benchmark.py; a row a batch size, a process a row, appended to the output.
"""

import argparse
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from detr.benchmark.steps.data import StepBatches, synthetic_batches
from detr.benchmark.steps.row import StepRow
from detr.benchmark.steps.throughput import time_steps
from detr.structures import Batch
from detr.telemetry.environment import collect_environment

NUM_CLASSES = 91
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None, "tf32": None}


class TransformersStep:
    """One optimizer step, as a user of the library would write it.

    Args:
        device: What it runs on.
        precision: fp32 | tf32 | bf16.
    """

    def __init__(self, device: torch.device, precision: str) -> None:
        config = transformers.DeformableDetrConfig(
            use_timm_backbone=True,
            backbone="resnet50",
            use_pretrained_backbone=False,
            with_box_refine=True,
            auxiliary_loss=True,
            num_queries=300,
            num_labels=NUM_CLASSES,
        )
        self.device = device
        self.autocast_dtype = _AUTOCAST[precision]
        if precision == "tf32":
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cudnn.allow_tf32 = True
        self.model: nn.Module = transformers.DeformableDetrForObjectDetection(config).to(device).train()
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, weight_decay=1e-4, fused=True)
        self.mean = torch.tensor([0.485, 0.456, 0.406], device=device).view(3, 1, 1)
        self.std = torch.tensor([0.229, 0.224, 0.225], device=device).view(3, 1, 1)
        self.loss = torch.zeros(())

    def __call__(self, batch: Batch) -> None:
        images = batch.images.to(self.device, non_blocking=True)
        pixels: Tensor = (images.pixels.float() / 255 - self.mean) / self.std
        labels = [
            {
                "class_labels": target.labels.to(self.device, non_blocking=True),
                "boxes": target.boxes.to(self.device, non_blocking=True),
            }
            for target in batch.targets
        ]
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            loss = self.model(pixel_values=pixels, pixel_mask=(~images.padding_mask).long(), labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 0.1, foreach=True)
        self.optimizer.step()
        self.loss = loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True, help="rows.jsonl file to append to")
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16"], default="bf16")
    parser.add_argument("--height", type=int, default=800, help="padded size in pixels")
    parser.add_argument("--width", type=int, default=1333)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--num-warmup", type=int, default=5)
    parser.add_argument("--num-steps", type=int, default=10)
    arguments = parser.parse_args()

    started_s = time.perf_counter()
    torch.manual_seed(42)
    device = torch.device(arguments.device)
    suffix = "" if arguments.precision == "bf16" else f"_{arguments.precision}"
    row = StepRow(
        name=f"transformers_batch{arguments.batch_size}{suffix}",
        repeat=0,
        status="ok",
        model=f"transformers {transformers.__version__}",
        precision=arguments.precision,
        compile=False,
        batch_size=arguments.batch_size,
        data_source="synthetic",
        height=arguments.height,
        width=arguments.width,
        date=datetime.now(UTC).isoformat(timespec="minutes"),
        overrides=tuple(sys.argv[1:]),
        environment=collect_environment(),
    )
    supply = StepBatches.cycle(
        synthetic_batches(
            batch_size=arguments.batch_size,
            height=arguments.height,
            width=arguments.width,
            targets_per_image=7,
            num_classes=NUM_CLASSES,
        )
    )
    try:
        step = TransformersStep(device, arguments.precision)
        row = replace(row, spent_s={"build": time.perf_counter() - started_s})
        whole = time_steps(step, supply, device, num_warmup=arguments.num_warmup, num_steps=arguments.num_steps)
        row = replace(row.with_times(whole, world_size=1), loss=float(step.loss))
    except torch.OutOfMemoryError as error:
        row = replace(row, status=f"failed: {str(error).splitlines()[0]}")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("a", encoding="utf-8") as file:
        file.write(row.to_json() + "\n")
    print(f"{row.name}: {row.status}, images/s {row.images_per_s}, step ms {row.step_ms}, peak GiB {row.peak_gib}")


if __name__ == "__main__":
    main()
