"""Why weights do not fit: the usual causes, read from what is missing, left over or of another shape."""

import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from detr.checkpoints.mismatch import Mismatch

# (our name, axis of the shape, key of the model that sets it)
_SIZE_KEYS = (
    (r"queries\.query_embed\.weight", 0, "model.num_queries"),
    (r"(encoder|decoder)\.layers\.\d+\.ffn\.linear1\.(weight|bias)", 0, "model.dim_feedforward"),
)


def likely_cause(
    mismatches: Sequence[Mismatch], theirs: Mapping[str, Tensor], model: Mapping[str, Tensor], *, codebase: str
) -> str:
    """One sentence on what to change, from the mismatches of an import.

    Args:
        mismatches: At least one.
        theirs: All tensors of the file.
        model: Our state dict.
        codebase: Whose names were assumed.
    """
    missing = [row for row in mismatches if row.problem.startswith("missing")]
    if len(missing) > len(model) // 2:
        return (
            f"the file does not hold the names of source={codebase}; its first are {', '.join(list(theirs)[:3])}. Is "
            "it of another codebase (source=), another version of it, or no Deformable DETR?"
        )
    structural = _structure(mismatches, theirs, model)
    if structural is not None:
        return structural
    for row in mismatches:
        size = _size(row, theirs)
        if size is not None:
            return size
    return "the file is of another model or backbone; give model= and backbone= as it was trained"


def _structure(mismatches: Sequence[Mismatch], theirs: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> str | None:
    """Another variant, or other numbers of layers and levels."""
    left_over = [row.theirs or "" for row in mismatches if row.ours is None]
    missing = [row.ours or "" for row in mismatches if row.problem.startswith("missing")]
    is_two_stage = "queries.enc_output.weight" in model
    if any(re.search(r"pos_trans|enc_output|memory_trans", name) for name in left_over) and not is_two_stage:
        return "the file is of a two-stage model; add model=two_stage"
    if any(name.startswith("queries.enc_output") for name in missing):
        return "the file is of a one-stage model; use model=refine or model=deformable_detr instead of model=two_stage"
    if any("equal to layer 0" in row.problem for row in mismatches):
        return "the file is of a model without box refinement; use model=deformable_detr instead of model=refine"
    if any("with which it is shared" in row.problem for row in mismatches) or any(
        re.search(r"decoder\.bbox_embed", name) for name in left_over
    ):
        return "the file is of a model with box refinement; add model=refine"
    for part in ("encoder", "decoder"):
        pattern = rf"(?:^|\.){part}\.layers\.(\d+)\."
        there = _count(pattern, theirs)
        here = _count(pattern, model)
        if there and there != here:
            return f"the file has {there} {part} layers and this model {here}; add model.num_{part}_layers={there}"
    if any(re.search(r"^neck\.input_proj\.", name) for name in missing):
        return "the file has fewer feature levels; use model=single_scale for a single-scale model"
    if any(re.search(r"input_proj\.[1-9]|neck\.", name) for name in left_over):
        return "the file has more feature levels; the single-scale model is model=single_scale, others have 4"
    if any(name.startswith("backbone.") for name in missing) or any("backbone" in name for name in left_over):
        return "the file has another backbone; give backbone= as it was trained"
    return None


def _count(pattern: str, names: Mapping[str, Tensor]) -> int:
    return len({match.group(1) for name in names if (match := re.search(pattern, name))})


def _size(row: Mismatch, theirs: Mapping[str, Tensor]) -> str | None:
    if row.ours is None or row.theirs is None or row.theirs not in theirs:
        return None
    shape = theirs[row.theirs].shape
    for pattern, axis, key in _SIZE_KEYS:
        if re.fullmatch(pattern, row.ours):
            return f"another size; add {key}={shape[axis]}"
    if row.ours.startswith("heads.class_embed."):
        return f"the file has {shape[0]} classes"
    if "sampling_offsets" in row.ours or "attention_weights" in row.ours:
        return "another number of levels, heads or sampling points (model.num_levels, model.num_heads, ..._points)"
    if row.ours.startswith("backbone."):
        return "the file has another backbone; give backbone= as it was trained"
    return None
