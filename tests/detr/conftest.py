"""A small detector whose features are given, and the reference tensors of the original."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from detr.models.backbone import Backbone
from detr.models.build import deformable_detr
from detr.models.deformable_detr import DeformableDETR
from detr.structures import Batch, ImageBatch, Target

VARIANTS = {
    "plain": {},
    "refine": {"with_box_refine": True},
    "two_stage": {"with_box_refine": True, "two_stage": True},
}


class Golden:
    """Tensors of one reference file by key, and its sizes."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            self.sizes = file.metadata()
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Tensors whose key starts with `prefix`, by the rest of it."""
        return {key.removeprefix(prefix): tensor for key, tensor in self.tensors.items() if key.startswith(prefix)}

    def int(self, name: str) -> int:
        return int(self.sizes[name])


@pytest.fixture(scope="session", params=list(VARIANTS))
def golden(request: pytest.FixtureRequest, shared_dir: Path) -> tuple[str, Golden]:
    """Each variant's name and reference tensors."""
    path = shared_dir / "golden" / f"{request.param}.safetensors"
    if not path.is_file():
        pytest.skip(f"no reference tensors at {path}")
    return request.param, Golden(path)


class GivenFeatures(Backbone):
    """Channels and strides of a backbone whose features the test supplies."""

    def __init__(self, channels: Sequence[int], strides: Sequence[int]) -> None:
        torch.nn.Module.__init__(self)
        self.channels = tuple(channels)
        self.strides = tuple(strides)


@pytest.fixture(scope="session")
def given_features() -> type[GivenFeatures]:
    return GivenFeatures


def make_small_detector(
    *, out_indices: Sequence[int] = (2, 3, 4), output_stride: int | None = None, **overrides: object
) -> DeformableDETR:
    """A detector of a few thousand parameters on a random ResNet, for behaviour rather than accuracy."""
    settings: dict[str, object] = {
        "num_classes": 5,
        "num_queries": 12,
        "num_levels": 4,
        "d_model": 32,
        "num_heads": 4,
        "num_encoder_layers": 1,
        "num_decoder_layers": 2,
        "dim_feedforward": 48,
        "dropout": 0.0,
    }
    settings.update(overrides)
    name = "resnet18" if output_stride is None else "resnet26"  # timm dilates bottlenecks only
    backbone = Backbone(name, freeze_norm=True, out_indices=out_indices, output_stride=output_stride)
    return deformable_detr(backbone, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def small_detector() -> Callable[..., DeformableDETR]:
    return make_small_detector


def make_batch(sizes: Sequence[tuple[int, int]] = ((96, 128), (80, 104)), boxes: Sequence[int] = (3, 0)) -> Batch:
    """Random images of `sizes` (h, w), with so many random boxes each."""
    generator = torch.Generator().manual_seed(0)
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator) for size in sizes]
    targets = tuple(
        Target(
            labels=torch.randint(0, 5, (count,), generator=generator),
            boxes=torch.rand(count, 4, generator=generator) * 0.4 + 0.1,
            image_id=index,
            orig_size=size,
        )
        for index, (size, count) in enumerate(zip(sizes, boxes, strict=True))
    )
    return Batch(ImageBatch.from_images(images), targets)


@pytest.fixture(scope="session")
def batch() -> Callable[..., Batch]:
    return make_batch
