"""The tables of tools/benchmark_data.py as Markdown."""

from detr.benchmark.data.memory import MemoryUse
from detr.benchmark.data.padding import PaddingRow
from detr.benchmark.data.speed import CoreSpeed, LoaderSpeed
from detr.data import Sampling


def speed_section(core: CoreSpeed, workers: dict[int, LoaderSpeed]) -> str:
    """Images a second of one core against Pillow's pipeline, and out of worker processes."""
    low, high = core.ratio_range
    lines = [
        "## Speed",
        "",
        "640 x 480 JPEGs of COCO's bytes a pixel under the DETR recipe, batches of 2; one core, CPU time.",
        "",
        "| pipeline | images/s a core |",
        "|---|---|",
        f"| Pillow, ToTensor, Normalize, padded as float | {core.baseline:.0f} |",
        f"| ours: uint8 to the padded batch | {core.ours:.0f} |",
        f"| ratio (median; least to largest of the rounds) | {core.ratio:.2f} ({low:.2f} to {high:.2f}) |",
    ]
    if workers:
        lines += [
            "",
            "| worker processes | images/s out of the loader | CPU ms a batch: main thread | its worker |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {count} | {speed.images_per_s:.0f} | {speed.main_ms:.1f} | "
            f"{'-' if speed.worker_ms is None else f'{speed.worker_ms:.0f}'} |"
            for count, speed in workers.items()
        ]
    return "\n".join(lines)


def padding_section(rows: list[PaddingRow], *, sizes_of: str) -> str:
    """Padding and shapes, a row a way of making batches."""
    lines = [
        "## Padding",
        "",
        f"The DETR recipe on {sizes_of}; padding as a share of the batches' pixels, and different padded shapes.",
        "",
        "| batch | sampling | pad_to | padding | shapes / batches |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.batch_size} | {_sampling_name(row.sampling)} | {row.pad_to} | {row.waste:.1%} | "
        f"{row.num_shapes} / {row.num_batches} |"
        for row in rows
    ]
    return "\n".join(lines)


def memory_section(use: MemoryUse, *, num_workers: int, num_annotations: int) -> str:
    """What the workers hold, at three times."""
    ends = " | ".join(f"{value:.1f}" for value in use.epoch_ends_mib)
    names = " | ".join(f"after epoch {number}" for number in range(1, len(use.epoch_ends_mib) + 1))
    return "\n".join(
        [
            "## Memory",
            "",
            f"{num_workers} workers over a file of {num_annotations:,} annotations; the sum of their proportional set "
            "sizes in MiB.",
            "",
            f"| a tenth into epoch 1 | {names} | largest change |",
            "|---|" + "---|" * (len(use.epoch_ends_mib) + 1),
            f"| {use.warm_mib:.1f} | {ends} | {use.growth:.2%} |",
        ]
    )


def _sampling_name(sampling: Sampling) -> str:
    names = [
        name
        for name, is_on in (("grouped", sampling.group_by_aspect), ("one scale", sampling.one_scale_a_batch))
        if is_on
    ]
    return ", ".join(names) or "off (recipe)"
