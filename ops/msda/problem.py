"""One call of the operator, as the backends see it."""

from typing import NamedTuple

import torch
from torch import Tensor


class Problem(NamedTuple):
    """The inputs of both forms of the operator, checked by `functional`.

    Attributes:
        value: (N, S, M, D).
        spatial_shapes: L pairs (H, W).
        locations: (N, Lq, M, L, P, 2): sampling locations, or offsets in the fused form.
        weights: (N, Lq, M, L, P): attention weights, or logits in the fused form.
        reference_points: (N, Lq, L, 2 or 4), which makes it the fused form; None otherwise.
        valid_sizes: (N, L, 2) integers (h, w), or None.
    """

    value: Tensor
    spatial_shapes: tuple[tuple[int, int], ...]
    locations: Tensor
    weights: Tensor
    reference_points: Tensor | None = None
    valid_sizes: Tensor | None = None

    @property
    def Lq(self) -> int:
        return self.locations.shape[1]


def named_dtypes(
    value: torch.dtype, locations: torch.dtype, weights: torch.dtype, reference_points: torch.dtype | None
) -> tuple[tuple[str, torch.dtype], ...]:
    """The dtypes of a problem under the names the user knows its tensors by; None for no reference points."""
    if reference_points is None:
        return ("value", value), ("sampling_locations", locations), ("attention_weights", weights)
    return (
        ("value", value),
        ("sampling_offsets", locations),
        ("attention_logits", weights),
        ("reference_points", reference_points),
    )


class Gradients(NamedTuple):
    """Gradients of the tensors of a `Problem`; None where none was asked for."""

    value: Tensor | None
    locations: Tensor | None
    weights: Tensor | None
    reference_points: Tensor | None
