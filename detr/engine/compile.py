"""torch.compile where it pays: the regions of the detector that repeat, not the whole."""

from dataclasses import dataclass

import torch
from torch import nn
from torch._dynamo.utils import counters

from detr.models import DeformableDETR


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


def compile_regions(model: nn.Module, *, max_graphs_per_region: int = 64) -> CompiledRegions:
    """Compile the backbone, the neck and every encoder and decoder layer of `model` in place.

    The layers of a stack share their graphs, since they run the same code. Padded sizes that vary make dynamic
    shapes after the second size; `data.pad_to` keeps them few. A region that cannot be compiled whole raises when
    it first runs: nothing falls back to eager in part.

    Args:
        model: A `DeformableDETR`; its parameter names do not change.
        max_graphs_per_region: More graphs of one region than this raise instead of running uncompiled.

    Raises:
        ValueError: The model is not a `DeformableDETR`.
    """
    if not isinstance(model, DeformableDETR):
        raise ValueError(
            f"trainer.compile=true knows the regions of DeformableDETR; got {type(model).__name__}. Set "
            "trainer.compile=false"
        )
    regions: dict[str, nn.Module] = {"backbone": model.backbone, "neck": model.neck}
    for stack in ("encoder", "decoder"):
        layers = getattr(model, stack).layers
        regions |= {f"{stack}.layers.{index}": layer for index, layer in enumerate(layers)}
    torch._dynamo.config.recompile_limit = max_graphs_per_region
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for region in regions.values():
        region.compile(fullgraph=True)
    return CompiledRegions(tuple(regions))
