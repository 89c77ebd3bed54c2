# mypy: disallow-untyped-defs=False
"""MSDA backward in Triton: a block of queries of one head a program, value gradients by global atomics."""

import triton
import triton.language as tl

from ops.msda.triton.common import SIZES, corner, level_size, load_reference, pixel_coordinates, softmax_tile


@triton.jit(do_not_specialize=SIZES)
def _msda_backward_kernel(
    grad_output_ptr,  # (N, Lq, M, D)
    value_ptr,  # (N, S, M, D)
    locations_ptr,  # (N, Lq, M, L, P, 2)
    weights_ptr,  # (N, Lq, M, L, P)
    reference_ptr,  # (N, Lq, L, FORM), float32
    valid_ptr,  # (N, L, 2) as (h, w)
    scale_ptr,  # factor into fixed point, with FIXED
    grad_value_ptr,  # (N, S, M, D) in the accumulator's dtype, zeroed
    grad_locations_ptr,  # like locations
    grad_weights_ptr,  # like weights
    grad_reference_ptr,  # (N, Lq, M, L, FORM), float32, still to be summed over heads
    S,
    Lq,
    M,
    H0, W0, H1, W1, H2, W2, H3, W3, H4, W4, H5, W5, H6, W6, H7, W7,
    D: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    FORM: tl.constexpr,
    HAS_VALID: tl.constexpr,
    NEEDS_VALUE: tl.constexpr,
    NEEDS_LOCATIONS: tl.constexpr,
    NEEDS_WEIGHTS: tl.constexpr,
    NEEDS_REFERENCE: tl.constexpr,
    FIXED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_LP: tl.constexpr,
):  # fmt: skip
    q = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    m = tl.program_id(1)
    n = tl.program_id(2).to(tl.int64)
    active = q < Lq
    query = n * Lq + q  # (BLOCK_Q,)
    row = query * M + m
    channels = tl.arange(0, BLOCK_D)
    channel_mask = channels < D
    points = tl.arange(0, BLOCK_LP)

    locations_ptr += row * (L * P * 2)
    weights_ptr += row * (L * P)
    reference_ptr += query * (L * FORM)
    grad_locations_ptr += row * (L * P * 2)
    grad_weights_ptr += row * (L * P)
    grad_reference_ptr += row * (L * FORM)
    value_ptr += (n * S * M + m) * D
    grad_value_ptr += (n * S * M + m) * D
    grad_output = tl.load(
        grad_output_ptr + row[:, None] * D + channels[None, :],
        mask=active[:, None] & channel_mask[None, :],
        other=0.0,
    ).to(tl.float32)
    if FIXED:
        scale = tl.load(scale_ptr)
    if FORM != 0:
        largest, inverse = softmax_tile(weights_ptr, active, L * P, BLOCK_LP)
    # gradients of the weights of all points: the softmax needs them together
    weight_gradients = tl.zeros((BLOCK_Q, BLOCK_LP), dtype=tl.float32)

    for level in range(L):
        H, W, start = level_size(
            level, H0, W0, H1, W1, H2, W2, H3, W3, H4, W4, H5, W5, H6, W6, H7, W7
        )  # fmt: skip
        valid_h = H
        valid_w = W
        if HAS_VALID:
            valid_h = tl.minimum(tl.load(valid_ptr + (n * L + level) * 2), H)
            valid_w = tl.minimum(tl.load(valid_ptr + (n * L + level) * 2 + 1), W)
        reference_x = tl.zeros((BLOCK_Q,), dtype=tl.float32)
        reference_y = tl.zeros((BLOCK_Q,), dtype=tl.float32)
        reference_w = tl.zeros((BLOCK_Q,), dtype=tl.float32)
        reference_h = tl.zeros((BLOCK_Q,), dtype=tl.float32)
        cx = load_reference(reference_ptr, level, active, FORM, 0)
        cy = load_reference(reference_ptr, level, active, FORM, 1)
        w = load_reference(reference_ptr, level, active, FORM, 2)
        h = load_reference(reference_ptr, level, active, FORM, 3)
        for p in range(P):
            point = level * P + p
            offset_x = tl.load(locations_ptr + 2 * point, mask=active, other=0.0).to(tl.float32)
            offset_y = tl.load(locations_ptr + 2 * point + 1, mask=active, other=0.0).to(tl.float32)
            x, y = pixel_coordinates(offset_x, offset_y, cx, cy, w, h, W, H, P, FORM)
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
            grad_weight = tl.zeros((BLOCK_Q,), dtype=tl.float32)
            grad_x = tl.zeros((BLOCK_Q,), dtype=tl.float32)
            grad_y = tl.zeros((BLOCK_Q,), dtype=tl.float32)
            for k in tl.static_range(4):
                valid, cell = corner(x0, y0, k % 2, k // 2, inside, valid_h, valid_w, H, W, start)
                x_weight = fx if k % 2 == 1 else 1.0 - fx
                y_weight = fy if k // 2 == 1 else 1.0 - fy
                offsets = cell.to(tl.int64)[:, None] * (M * D) + channels[None, :]
                mask = valid[:, None] & channel_mask[None, :]
                if NEEDS_LOCATIONS or NEEDS_WEIGHTS or NEEDS_REFERENCE:
                    values = tl.load(value_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
                    dot = tl.sum(values * grad_output, axis=1)
                    grad_weight += x_weight * y_weight * dot
                    grad_x += (y_weight if k % 2 == 1 else -y_weight) * dot
                    grad_y += (x_weight if k // 2 == 1 else -x_weight) * dot
                if NEEDS_VALUE:
                    contribution = (weight * x_weight * y_weight)[:, None] * grad_output
                    if FIXED:
                        # to the nearest integer: the conversion itself cuts off
                        contribution = contribution * scale
                        contribution += tl.where(contribution < 0, -0.5, 0.5)
                    tl.atomic_add(
                        grad_value_ptr + offsets,
                        contribution.to(grad_value_ptr.dtype.element_ty),
                        mask=mask,
                        sem="relaxed",
                    )
            # a sample that is outside has no gradient, whatever its weight
            grad_x = tl.where(inside, grad_x * weight, 0.0)
            grad_y = tl.where(inside, grad_y * weight, 0.0)
            weight_gradients = tl.where((points == point)[None, :], grad_weight[:, None], weight_gradients)
            if FORM == 2:
                location_x = grad_x
                location_y = grad_y
            else:
                location_x = grad_x * W
                location_y = grad_y * H
            if FORM == 4:
                reference_w += location_x * offset_x * (0.5 / P)
                reference_h += location_y * offset_y * (0.5 / P)
                location_x = location_x * w * (0.5 / P)
                location_y = location_y * h * (0.5 / P)
            reference_x += grad_x * W
            reference_y += grad_y * H
            if NEEDS_LOCATIONS:
                element = grad_locations_ptr.dtype.element_ty
                tl.store(grad_locations_ptr + 2 * point, location_x.to(element), mask=active)
                tl.store(grad_locations_ptr + 2 * point + 1, location_y.to(element), mask=active)
        if NEEDS_REFERENCE:
            tl.store(grad_reference_ptr + level * FORM, reference_x, mask=active)
            tl.store(grad_reference_ptr + level * FORM + 1, reference_y, mask=active)
            if FORM == 4:
                tl.store(grad_reference_ptr + level * FORM + 2, reference_w, mask=active)
                tl.store(grad_reference_ptr + level * FORM + 3, reference_h, mask=active)

    if NEEDS_WEIGHTS:
        mask = active[:, None] & (points < L * P)[None, :]
        if FORM != 0:
            logits = tl.load(weights_ptr[:, None] + points[None, :], mask=mask, other=float("-inf"))
            weights = tl.exp(logits.to(tl.float32) - largest[:, None]) * inverse[:, None]
            total = tl.sum(weights * weight_gradients, axis=1)
            weight_gradients = weights * (weight_gradients - total[:, None])
        tl.store(
            grad_weights_ptr[:, None] + points[None, :],
            weight_gradients.to(grad_weights_ptr.dtype.element_ty),
            mask=mask,
        )
