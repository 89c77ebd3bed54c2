"""Inputs of the operator's benchmarks: what an encoder, a decoder and a worst case ask of it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ops.msda.problem import Problem

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# strides 8, 16, 32 and 64 of an image of 800 x 1333 pixels
ENCODER_SHAPES = ((100, 167), (50, 84), (25, 42), (13, 21))


@dataclass(frozen=True)
class OpCase:
    """One workload.

    Attributes:
        kind: encoder: the queries are the cells, samples around them; uniform: the same queries, samples anywhere;
            decoder: `num_queries` queries, samples anywhere.
        batch_size: Images N.
        noise_px: Encoder only: standard deviation of the offsets around the initial directions, in pixels of each
            level.
        num_queries: Decoder only.
        num_heads, head_dim, num_points: M, D and P.
    """

    kind: str
    batch_size: int
    noise_px: float = 1.5
    num_queries: int = 300
    num_heads: int = 8
    head_dim: int = 32
    num_points: int = 4

    def __post_init__(self) -> None:
        if self.kind not in ("encoder", "uniform", "decoder"):
            raise ValueError(f"case must be encoder, uniform or decoder; got {self.kind!r}")


def make_inputs(
    case: OpCase,
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int,
    shapes: tuple[tuple[int, int], ...] = ENCODER_SHAPES,
) -> tuple[Problem, Tensor]:
    """A problem in the form with locations and weights, and a gradient of its output.

    Value, weights and gradient are of `dtype`, locations are float32: bfloat16 pixels would be off by whole pixels.
    `shapes` are (H, W) a level.
    """
    generator = torch.Generator(device).manual_seed(seed)
    L, M, P, D = len(shapes), case.num_heads, case.num_points, case.head_dim
    S = sum(H * W for H, W in shapes)
    N, Lq = case.batch_size, case.num_queries if case.kind == "decoder" else S
    if case.kind == "encoder":
        points = torch.cat([_centres(H, W, device) for H, W in shapes])  # (S, 2)
        noise = torch.randn(N, S, M, L, P, 2, device=device, generator=generator) * case.noise_px
        offsets_px = _initial_offsets(M, P, device)[:, None] + noise  # (N, S, M, L, P, 2)
        sides = torch.tensor([(W, H) for H, W in shapes], device=device, dtype=torch.float32)
        locations = points[:, None, None, None] + offsets_px / sides[:, None]
    else:
        locations = torch.rand(N, Lq, M, L, P, 2, device=device, generator=generator)
    logits = torch.randn(N, Lq, M, L * P, device=device, generator=generator)
    weights = logits.softmax(-1).view(N, Lq, M, L, P).to(dtype)
    value = torch.randn(N, S, M, D, device=device, generator=generator).to(dtype)
    grad_output = torch.randn(N, Lq, M * D, device=device, generator=generator).to(dtype)
    return Problem(value, shapes, locations.contiguous(), weights), grad_output


def make_fused_inputs(case: OpCase, dtype: torch.dtype, device: torch.device, *, seed: int) -> tuple[Problem, Tensor]:
    """The same samples in the fused form: offsets in pixels around points, and logits, as projections give them.

    Everything but the reference points is of `dtype`.
    """
    problem, grad_output = make_inputs(case, dtype, device, seed=seed)
    value, shapes, locations, weights, *_ = problem
    N, Lq = locations.shape[:2]
    generator = torch.Generator(device).manual_seed(seed)
    if case.kind == "encoder":
        points = torch.cat([_centres(H, W, device) for H, W in shapes]).expand(N, -1, -1)  # (N, S, 2)
    else:
        points = torch.rand(N, Lq, 2, device=device, generator=generator)
    sides = torch.tensor([(W, H) for H, W in shapes], device=device, dtype=torch.float32)
    offsets = (locations - points[:, :, None, None, None]) * sides[:, None]  # (N, Lq, M, L, P, 2)
    logits = torch.randn(weights.shape, device=device, generator=generator)
    reference_points = points[:, :, None].expand(-1, -1, len(shapes), -1).contiguous()  # (N, Lq, L, 2)
    return Problem(value, shapes, offsets.to(dtype), logits.to(dtype), reference_points), grad_output


def compulsory_bytes(problem: Problem, *, backward: bool) -> int:
    """Bytes that must move through device memory: each input read and each result written once."""
    value, _, locations, weights, *_ = problem
    inputs = sum(tensor.numel() * tensor.element_size() for tensor in (value, locations, weights))
    output = locations.shape[0] * problem.Lq * value.shape[2] * value.shape[3] * value.element_size()
    return inputs * (2 if backward else 1) + output


def _centres(H: int, W: int, device: torch.device) -> Tensor:
    """(H * W, 2) cell centres as (x, y) in [0, 1]."""
    y, x = torch.meshgrid(
        (torch.arange(H, device=device) + 0.5) / H, (torch.arange(W, device=device) + 0.5) / W, indexing="ij"
    )
    return torch.stack((x, y), -1).view(-1, 2)


def _initial_offsets(num_heads: int, num_points: int, device: torch.device) -> Tensor:
    """(M, P, 2) pixels: where an untrained MSDeformAttn looks."""
    angle = torch.arange(num_heads, dtype=torch.float32) * (2 * math.pi / num_heads)
    direction = torch.stack((angle.cos(), angle.sin()), -1)
    direction = direction / direction.abs().amax(-1, keepdim=True)
    return (direction[:, None] * torch.arange(1, num_points + 1)[:, None]).to(device)
