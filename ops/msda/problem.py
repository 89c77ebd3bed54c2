"""One call of the operator, as the backends see it."""

from collections.abc import Iterator
from typing import NamedTuple

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

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The floating tensors under the names the user knows them by."""
        fused = self.reference_points is not None
        yield "value", self.value
        yield ("sampling_offsets" if fused else "sampling_locations"), self.locations
        yield ("attention_logits" if fused else "attention_weights"), self.weights
        if self.reference_points is not None:
            yield "reference_points", self.reference_points


class Gradients(NamedTuple):
    """Gradients of the tensors of a `Problem`; None where none was asked for."""

    value: Tensor | None
    locations: Tensor | None
    weights: Tensor | None
    reference_points: Tensor | None
