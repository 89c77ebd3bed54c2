"""Weights between this project and other codebases: strict both ways, with a table of what did not fit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from detr.checkpoints.causes import likely_cause
from detr.checkpoints.detrex import detrex_places
from detr.checkpoints.huggingface import huggingface_file_name, huggingface_places
from detr.checkpoints.mismatch import Mismatch, format_mismatches
from detr.checkpoints.mmdet import mmdet_places
from detr.checkpoints.original import original_places
from detr.checkpoints.places import Layout, Place

Codebase = Literal["original", "hf", "mmdet", "detrex"]

_PLACES: dict[Codebase, Callable[[str, Layout], list[Place]]] = {
    "original": original_places,
    "hf": huggingface_places,
    "mmdet": mmdet_places,
    "detrex": detrex_places,
}


class WeightsDoNotFit(ValueError):
    """Weights of another codebase that are not those of this model; the message is the table.

    Attributes:
        mismatches: What did not fit, in the order of our model; never empty.
    """

    def __init__(self, message: str, mismatches: list[Mismatch]) -> None:
        super().__init__(message)
        self.mismatches = mismatches


@dataclass(frozen=True)
class Imported:
    """What an import made.

    Attributes:
        state: Our state dict.
        notes: What a reader should know: tensors that were made of others, or left out.
    """

    state: dict[str, Tensor]
    notes: tuple[str, ...]


def import_state(
    theirs: Mapping[str, Tensor], codebase: Codebase, model: Mapping[str, Tensor], *, with_box_refine: bool, source: str
) -> Imported:
    """Our state dict from another codebase's. Every tensor must find its place, on both sides.

    Counters of batch norms (`num_batches_tracked`) may be left over, since frozen norms have none.

    Args:
        theirs: By the codebase's names, with or without its aliases.
        codebase: Whose names they are.
        model: State dict of the model to fill, for names and shapes; may be on the meta device.
        with_box_refine: Of that model.
        source: Where the weights come from, for messages.

    Raises:
        WeightsDoNotFit: Tensors are missing, left over, or of another shape, or such as must be equal are not.
        ValueError: No such codebase.
    """
    places_of = _places(codebase)
    if codebase == "hf":
        theirs = {huggingface_file_name(name): tensor for name, tensor in theirs.items()}
    layout = Layout.of(model, with_box_refine=with_box_refine)
    state: dict[str, Tensor] = {}
    mismatches: list[Mismatch] = []
    notes: list[str] = []
    used: set[str] = set()
    for name, own in model.items():
        parts = []
        for place in places_of(name, layout):
            shape = own.shape if place.chunk is None else (own.shape[0] // place.chunk[1], *own.shape[1:])
            found = [alias for alias in place.names if alias in theirs]
            used.update(found)
            if not found and place.fallback in theirs:
                notes.append(f"{name} is a copy of {place.fallback}: the file has no {place.names[0]}")
                found = [str(place.fallback)]
                used.update(found)
            if not found and place.optional:
                parts.append(torch.zeros(shape, dtype=own.dtype))
                if not name.endswith("num_batches_tracked"):
                    notes.append(f"{name} is zero: the file has no {place.names[0]}")
                continue
            mismatch = _check(name, own.shape, shape, place, found, theirs)
            if mismatch is None:
                parts.append(theirs[found[0]])
            else:
                mismatches.append(mismatch)
        if len(parts) == len(places_of(name, layout)):
            state[name] = parts[0].clone() if len(parts) == 1 else torch.cat(parts)
    left_over = [name for name in theirs if name not in used and not name.endswith("num_batches_tracked")]
    mismatches += [Mismatch(None, name, f"left over, {tuple(theirs[name].shape)}") for name in left_over]
    if with_box_refine and not mismatches and _are_box_heads_shared(state, layout):
        mismatches.append(
            Mismatch("heads.bbox_embed.1.layers.2.weight", None, "equal to layer 0, as in a model without refinement")
        )
    if mismatches:
        cause = likely_cause(mismatches, theirs, model, codebase=codebase)
        raise WeightsDoNotFit(format_mismatches(mismatches, source, num_tensors=len(model), cause=cause), mismatches)
    return Imported(state, tuple(notes))


def export_state(model: Mapping[str, Tensor], codebase: Codebase, *, with_box_refine: bool) -> dict[str, Tensor]:
    """Another codebase's state dict from ours; what it lists several times is one tensor under all its names.

    Args:
        model: Our state dict.
        codebase: Whose names to use.
        with_box_refine: Of that model.

    Raises:
        ValueError: No such codebase, or it has no name for a tensor.
    """
    places_of = _places(codebase)
    layout = Layout.of(model, with_box_refine=with_box_refine)
    theirs: dict[str, Tensor] = {}
    for name, tensor in model.items():
        for place in places_of(name, layout):
            if place.optional and not bool(tensor.any()):
                continue
            part = tensor if place.chunk is None else tensor.chunk(place.chunk[1])[place.chunk[0]].clone()
            theirs.update(dict.fromkeys(place.names, part))
    return theirs


def guess_codebase(names: Mapping[str, Tensor]) -> Codebase | Literal["ours"] | None:
    """Whose names these are, or None."""
    marks: tuple[tuple[Codebase | Literal["ours"], tuple[str, ...]], ...] = (
        ("ours", ("backbone.net.", "heads.class_embed.")),
        ("hf", ("model.backbone.", "model.encoder.layers.")),
        ("mmdet", ("bbox_head.",)),
        ("detrex", ("transformer.level_embeds", "transformer.encoder.layers.0.attentions.")),
        ("original", ("transformer.level_embed", "backbone.0.body.")),
    )
    for codebase, prefixes in marks:
        if any(name.startswith(prefixes) for name in names):
            return codebase
    return None


def num_classes_in(theirs: Mapping[str, Tensor]) -> int:
    """Rows of the class heads of another codebase's state dict.

    Raises:
        ValueError: It has no class head that is known by name.
    """
    for prefix in (
        "class_embed",
        "bbox_head.cls_branches",
        "model.decoder.class_embed",
        "transformer.decoder.class_embed",
    ):
        head = theirs.get(f"{prefix}.0.bias")
        if head is not None:
            return len(head)
    raise ValueError(
        f"the file has no class head of a Deformable DETR; its first names are {', '.join(list(theirs)[:5])}. Is it "
        "the weights of a backbone (backbone.pretrained=FILE), or of another detector?"
    )


def _places(codebase: Codebase) -> Callable[[str, Layout], list[Place]]:
    if codebase not in _PLACES:
        raise ValueError(f"no names are known of {codebase!r}; use one of {', '.join(get_args(Codebase))}")
    return _PLACES[codebase]


def _check(
    name: str, own: torch.Size, shape: tuple[int, ...], place: Place, found: list[str], theirs: Mapping[str, Tensor]
) -> Mismatch | None:
    """What is wrong with the tensors `found` at a place that should hold `shape`."""
    if not found:
        return Mismatch(name, place.names[0], f"missing in the file; {tuple(own)} here")
    first = theirs[found[0]]
    if tuple(first.shape) != tuple(shape):
        return Mismatch(name, found[0], f"{tuple(first.shape)} in the file, {tuple(shape)} here")
    for alias in found[1:]:
        if theirs[alias].shape != first.shape or not torch.equal(theirs[alias], first):
            return Mismatch(name, alias, f"differs from {found[0]}, with which it is shared in this model")
    return None


def _are_box_heads_shared(state: Mapping[str, Tensor], layout: Layout) -> bool:
    """Whether all box heads are one, bit for bit: training a model with refinement drives them apart."""
    if layout.two_stage or layout.num_decoder_layers < 2:
        return False
    names = [name.removeprefix("heads.bbox_embed.0.") for name in state if name.startswith("heads.bbox_embed.0.")]
    return all(
        torch.equal(state[f"heads.bbox_embed.0.{rest}"], state[f"heads.bbox_embed.{layer}.{rest}"])
        for layer in range(1, layout.num_decoder_layers)
        for rest in names
    )
