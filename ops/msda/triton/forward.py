# mypy: disallow-untyped-defs=False
"""MSDA forward in Triton: a block of queries of one head a program."""

import triton
import triton.language as tl

from ops.msda.triton.common import SIZES, corner, level_size, load_reference, pixel_coordinates, softmax_tile


@triton.jit(do_not_specialize=SIZES)
def _msda_forward_kernel(
    value_ptr,  # (N, S, M, D)
    locations_ptr,  # (N, Lq, M, L, P, 2)
    weights_ptr,  # (N, Lq, M, L, P)
    reference_ptr,  # (N, Lq, L, FORM), float32
    valid_ptr,  # (N, L, 2) as (h, w)
    output_ptr,  # (N, Lq, M, D)
    S,
    Lq,
    M,
    H0, W0, H1, W1, H2, W2, H3, W3, H4, W4, H5, W5, H6, W6, H7, W7,
    D: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    FORM: tl.constexpr,
    HAS_VALID: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_LP: tl.constexpr,
):  # fmt: skip
    # the image is the slowest grid dimension, so that the values in flight stay in the L2
    q = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    m = tl.program_id(1)
    n = tl.program_id(2).to(tl.int64)
    active = q < Lq
    query = n * Lq + q  # (BLOCK_Q,)
    row = query * M + m
    channels = tl.arange(0, BLOCK_D)
    channel_mask = channels < D

    locations_ptr += row * (L * P * 2)
    weights_ptr += row * (L * P)
    reference_ptr += query * (L * FORM)
    value_ptr += (n * S * M + m) * D
    if FORM != 0:
        largest, inverse = softmax_tile(weights_ptr, active, L * P, BLOCK_LP)

    total = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
    for level in range(L):
        H, W, start = level_size(
            level, H0, W0, H1, W1, H2, W2, H3, W3, H4, W4, H5, W5, H6, W6, H7, W7
        )  # fmt: skip
        valid_h = H
        valid_w = W
        if HAS_VALID:
            valid_h = tl.minimum(tl.load(valid_ptr + (n * L + level) * 2), H)
            valid_w = tl.minimum(tl.load(valid_ptr + (n * L + level) * 2 + 1), W)
        cx = load_reference(reference_ptr, level, active, FORM, 0)
        cy = load_reference(reference_ptr, level, active, FORM, 1)
        w = load_reference(reference_ptr, level, active, FORM, 2)
        h = load_reference(reference_ptr, level, active, FORM, 3)
        for p in range(P):
            point = level * P + p
            offset_x = tl.load(locations_ptr + 2 * point, mask=active, other=0.0).to(tl.float32)
            offset_y = tl.load(locations_ptr + 2 * point + 1, mask=active, other=0.0).to(tl.float32)
            x, y = pixel_coordinates(offset_x, offset_y, cx, cy, w, h, W, H, P, FORM)
            # false for NaN, so no such coordinate reaches the conversion to int
            inside = active & (x > -1) & (x < W) & (y > -1) & (y < H)
            x = tl.where(inside, x, 0.0)
            y = tl.where(inside, y, 0.0)
            weight = tl.load(weights_ptr + point, mask=active, other=0.0).to(tl.float32)
            if FORM != 0:
                weight = tl.exp(weight - largest) * inverse
            x_floor = tl.floor(x)
            y_floor = tl.floor(y)
            fx = x - x_floor
            fy = y - y_floor
            x0 = x_floor.to(tl.int32)
            y0 = y_floor.to(tl.int32)
            for k in tl.static_range(4):
                valid, cell = corner(x0, y0, k % 2, k // 2, inside, valid_h, valid_w, H, W, start)
                x_weight = fx if k % 2 == 1 else 1.0 - fx
                y_weight = fy if k // 2 == 1 else 1.0 - fy
                offsets = cell.to(tl.int64) * (M * D)
                values = tl.load(
                    value_ptr + offsets[:, None] + channels[None, :],
                    mask=valid[:, None] & channel_mask[None, :],
                    other=0.0,
                ).to(tl.float32)
                corner_weight = tl.where(valid, weight * x_weight * y_weight, 0.0)
                total += corner_weight[:, None] * values
    tl.store(
        output_ptr + row[:, None] * D + channels[None, :],
        total.to(output_ptr.dtype.element_ty),
        mask=active[:, None] & channel_mask[None, :],
    )
