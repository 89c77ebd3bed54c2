"""Where a tensor of ours lies in the files of another codebase."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Place:
    """One tensor of another codebase that holds a tensor of ours, or a part of it.

    Attributes:
        names: Its name there; where the tensor is listed several times, all its names, which hold equal values.
        chunk: (index, count) where it holds one of `count` equal parts along the first axis; None: all of it.
        optional: Not being there means zeros, and zeros are not written.
        fallback: What stands in for it where none of `names` is there: the codebase ties the two.
    """

    names: tuple[str, ...]
    chunk: tuple[int, int] | None = None
    optional: bool = False
    fallback: str | None = None


@dataclass(frozen=True)
class Layout:
    """What the names depend on.

    Attributes:
        num_decoder_layers: Decoder layers K.
        with_box_refine: Each layer has heads of its own.
        two_stage: There is one pair of heads more, for the proposals.
        num_features: Levels that are 1x1 convolutions of backbone features; the rest are strided.
    """

    num_decoder_layers: int
    with_box_refine: bool
    two_stage: bool
    num_features: int

    @classmethod
    def of(cls, state: Mapping[str, Tensor], *, with_box_refine: bool) -> "Layout":
        """The layout of a model by its state dict, tensors on any device."""
        layers = {match.group(1) for name in state if (match := re.match(r"decoder\.layers\.(\d+)\.", name))}
        levels = [name for name in state if re.fullmatch(r"neck\.input_proj\.\d+\.0\.weight", name)]
        return cls(
            num_decoder_layers=len(layers),
            with_box_refine=with_box_refine,
            two_stage="queries.enc_output.weight" in state,
            num_features=sum(state[name].shape[-1] == 1 for name in levels),
        )

    @property
    def num_heads(self) -> int:
        """Pairs of heads that another codebase lists; without refinement they are one pair several times."""
        return self.num_decoder_layers + int(self.two_stage)


def translate(name: str, patterns: Sequence[tuple[str, str]]) -> str | None:
    """`name` with the first fitting prefix replaced, or None; {} in a pattern stands for one number."""
    for source, target in patterns:
        match = re.match(re.escape(source).replace(r"\{\}", r"(\d+)"), name)
        if match:
            number = match.group(1) if match.groups() else ""
            return target.replace("{}", number) + name[match.end() :]
    return None


def head_names(name: str, layout: Layout, prefix: str) -> list[str] | None:
    """Names of a head of ours as `prefix` + the rest, once for each layer that shares it; None for no head."""
    match = re.match(r"heads\.(class_embed|bbox_embed)\.(\d+)\.(.*)", name)
    if match is None:
        return None
    kind, pair, rest = match.groups()
    pairs = [int(pair)] if layout.with_box_refine else range(layout.num_heads)
    return [f"{prefix}{kind}.{index}.{rest}" for index in pairs]
