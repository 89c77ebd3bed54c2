"""torch.compile where it pays: the regions of the detector that repeat, not the whole."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn
from torch._dynamo.utils import counters

from detr.losses import SetCriterion
from detr.models import DeformableDETR

ShapeMode = Literal["auto", "static"]


@dataclass(frozen=True)
class CompiledRegions:
    """What `compile_regions` compiled.

    Attributes:
        names: The modules, as named in the model.
    """

    names: tuple[str, ...]

    @property
    def num_graphs(self) -> int:
        """Graphs compiled in this process so far; grows with every new shape class."""
        return int(counters["stats"]["unique_graphs"])

    def __str__(self) -> str:
        return f"{len(self.names)} regions: {', '.join(self.names)}"


def compile_regions(
    model: nn.Module,
    criterion: SetCriterion | None = None,
    *,
    shapes: ShapeMode = "auto",
    max_graphs_per_region: int = 64,
) -> CompiledRegions:
    """Compile the backbone, the neck and every encoder and decoder layer of `model`, and the criterion, in place.

    The layers of a stack share their graphs, since they run the same code. `data.pad_to` keeps the padded sizes
    few. A region that cannot be compiled whole raises when it first runs: nothing falls back to eager in part.

    Args:
        model: A `DeformableDETR`; its parameter names do not change.
        criterion: Its arithmetic is compiled, too.
        shapes: What a second padded size does. `auto` compiles one graph for all sizes from then on, which cannot be
            made for one; `static` compiles every size for itself, up to a minute each the first
            time, after that from PyTorch's cache on disk.
        max_graphs_per_region: More graphs of one region than this raise instead of running uncompiled.

    Raises:
        ValueError: The model is not a `DeformableDETR`, or `shapes` is neither.
    """
    if not isinstance(model, DeformableDETR):
        raise ValueError(
            f"trainer.compile=true knows the regions of DeformableDETR; got {type(model).__name__}. Set "
            "trainer.compile=false"
        )
    if shapes not in get_args(ShapeMode):
        raise ValueError(f"trainer.compile_shapes must be auto or static; got {shapes!r}")
    regions: dict[str, nn.Module] = {"backbone": model.backbone, "neck": model.neck}
    for stack in ("encoder", "decoder"):
        layers = getattr(model, stack).layers
        regions |= {f"{stack}.layers.{index}": layer for index, layer in enumerate(layers)}
    torch._dynamo.config.recompile_limit = max_graphs_per_region
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for region in regions.values():
        region.compile(fullgraph=True, dynamic=False if shapes == "static" else None)
    if criterion is None:
        return CompiledRegions(tuple(regions))
    criterion.compile_arithmetic()
    return CompiledRegions((*regions, "criterion"))
