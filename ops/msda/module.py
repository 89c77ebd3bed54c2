"""MSDeformAttn: the attention layer around the operator.

Shapes: N batch, S = sum(H_l * W_l), M heads, D channels a head, C = M*D, Lq queries, L levels, P points.
"""

import math

import torch
from torch import Tensor, nn

from ops.arguments import require_tensor
from ops.msda.config import KernelConfig
from ops.msda.contract import SpatialShapes, check_kernel
from ops.msda.functional import ms_deform_attn_fused


class MSDeformAttn(nn.Module):
    """Multi-scale deformable attention with its projections.

    See :func:`ops.ms_deform_attn_fused` for the arithmetic. Initialised as in the original: a head starts
    looking in its own direction, points at growing distance, uniform weights.

    Args:
        d_model: Channels C, a multiple of `num_heads`.
        num_levels: Feature levels L.
        num_heads: Heads M.
        num_points: Points P a head and level.
        kernel: Which kernel runs; None means `KernelConfig()`.

    Raises:
        TypeError: `kernel` is no `KernelConfig`.
        ValueError: `d_model` is not a multiple of `num_heads`, or a size is below 1.
    """

    def __init__(
        self,
        d_model: int = 256,
        num_levels: int = 4,
        num_heads: int = 8,
        num_points: int = 4,
        *,
        kernel: KernelConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {
            "d_model": d_model,
            "num_levels": num_levels,
            "num_heads": num_heads,
            "num_points": num_points,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"MSDeformAttn: {name} must be at least 1; got {size}")
        if d_model % num_heads:
            raise ValueError(f"MSDeformAttn: d_model={d_model} must be a multiple of num_heads={num_heads}")
        self.d_model = d_model
        self.num_levels = num_levels
        self.num_heads = num_heads
        self.num_points = num_points
        self.kernel = check_kernel(kernel)

        samples = num_heads * num_levels * num_points
        self.sampling_offsets = nn.Linear(d_model, samples * 2, device=device, dtype=dtype)
        self.attention_weights = nn.Linear(d_model, samples, device=device, dtype=dtype)
        self.value_proj = nn.Linear(d_model, d_model, device=device, dtype=dtype)
        self.output_proj = nn.Linear(d_model, d_model, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as the original does (its `_reset_parameters`)."""
        nn.init.zeros_(self.sampling_offsets.weight)
        angle = torch.arange(self.num_heads, dtype=torch.float32) * (2 * math.pi / self.num_heads)
        direction = torch.stack((angle.cos(), angle.sin()), dim=-1)
        direction = direction / direction.abs().amax(-1, keepdim=True)  # on the unit square, not the circle
        distance = torch.arange(1, self.num_points + 1, dtype=torch.float32)
        bias = direction[:, None, None] * distance[:, None]  # (M, 1, P, 2)
        bias = bias.expand(-1, self.num_levels, -1, -1)  # (M, L, P, 2)
        with torch.no_grad():
            self.sampling_offsets.bias.copy_(bias.flatten())
        nn.init.zeros_(self.attention_weights.weight)
        nn.init.zeros_(self.attention_weights.bias)
        for projection in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        memory: Tensor,
        spatial_shapes: SpatialShapes,
        *,
        valid_sizes: Tensor | None = None,
    ) -> Tensor:
        """Attend from each query to a few points of every level.

        Args:
            query: (N, Lq, C), position embedding added.
            reference_points: (N, Lq, L, 2) points (x, y) or (N, Lq, L, 4) boxes (cx, cy, w, h), normalised to
                each padded level. float32 whatever the autocast dtype.
            memory: (N, S, C), the feature maps that are looked at.
            spatial_shapes: L pairs (H, W), see :func:`ops.ms_deform_attn`.
            valid_sizes: (N, L, 2) integers (h, w): cells that are image; None if nothing is padded.

        Returns:
            (N, Lq, C).

        Raises:
            TypeError: An argument is no tensor; the message names it.
            ValueError: A shape does not fit this module or the other arguments.
        """
        require_tensor("memory", memory)
        if memory.ndim != 3 or memory.shape[-1] != self.d_model:
            raise ValueError(f"memory must be (N, S, {self.d_model}); got shape {tuple(memory.shape)}")
        value = self.value_proj(memory)
        return self.attend(query, reference_points, value, spatial_shapes, valid_sizes=valid_sizes)

    def attend(
        self,
        query: Tensor,
        reference_points: Tensor,
        value: Tensor,
        spatial_shapes: SpatialShapes,
        *,
        valid_sizes: Tensor | None = None,
    ) -> Tensor:
        """`forward` with the projected memory, for layers that project one memory together.

        Args:
            value: (N, S, C), `value_proj` of the memory.

        The other arguments, the result and the errors are those of `forward`.
        """
        require_tensor("query", query)
        require_tensor("value", value)
        if query.ndim != 3 or query.shape[-1] != self.d_model:
            raise ValueError(f"query must be (N, Lq, {self.d_model}); got shape {tuple(query.shape)}")
        if value.ndim != 3 or value.shape[-1] != self.d_model:
            raise ValueError(f"value must be (N, S, {self.d_model}); got shape {tuple(value.shape)}")
        if len(spatial_shapes) != self.num_levels:
            raise ValueError(
                f"spatial_shapes must hold {self.num_levels} levels, as this module was built with "
                f"num_levels={self.num_levels}; got {len(spatial_shapes)}"
            )
        M, L, P = self.num_heads, self.num_levels, self.num_points
        sampling_offsets = self.sampling_offsets(query).unflatten(-1, (M, L, P, 2))  # (N, Lq, M, L, P, 2)
        attention_logits = self.attention_weights(query).unflatten(-1, (M, L, P))  # (N, Lq, M, L, P)
        output = ms_deform_attn_fused(
            value.unflatten(-1, (M, -1)),  # (N, S, M, D)
            spatial_shapes,
            reference_points,
            sampling_offsets,
            attention_logits,
            valid_sizes=valid_sizes,
            kernel=self.kernel,
        )
        return self.output_proj(output)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_levels={self.num_levels}, num_points={self.num_points}, {self.kernel}"
