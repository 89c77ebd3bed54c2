# mypy: disallow-untyped-defs=False
"""Device functions shared by the Triton kernels.

Shapes: BLOCK_Q queries of one head a program, BLOCK_D >= D channels, BLOCK_LP >= L * P points.
FORM: 0 for locations and weights, 2 for offsets around points (x, y), 4 for offsets in boxes (cx, cy, w, h).
"""

import triton
import triton.language as tl

MAX_LEVELS = 8
# sizes change with every batch of images: no kernel may be compiled for one of them
SIZES = [f"{side}{level}" for level in range(MAX_LEVELS) for side in "HW"] + ["S", "Lq"]


@triton.jit
def level_size(level, H0, W0, H1, W1, H2, W2, H3, W3, H4, W4, H5, W5, H6, W6, H7, W7):
    """(H, W, start) of one level, chosen among arguments: kernels take no arrays by value."""
    H = tl.where(level == 0, H0, H1)
    W = tl.where(level == 0, W0, W1)
    start = tl.where(level == 0, 0, H0 * W0)
    end = H0 * W0 + H1 * W1
    H = tl.where(level == 2, H2, H)
    W = tl.where(level == 2, W2, W)
    start = tl.where(level == 2, end, start)
    end += H2 * W2
    H = tl.where(level == 3, H3, H)
    W = tl.where(level == 3, W3, W)
    start = tl.where(level == 3, end, start)
    end += H3 * W3
    H = tl.where(level == 4, H4, H)
    W = tl.where(level == 4, W4, W)
    start = tl.where(level == 4, end, start)
    end += H4 * W4
    H = tl.where(level == 5, H5, H)
    W = tl.where(level == 5, W5, W)
    start = tl.where(level == 5, end, start)
    end += H5 * W5
    H = tl.where(level == 6, H6, H)
    W = tl.where(level == 6, W6, W)
    start = tl.where(level == 6, end, start)
    end += H6 * W6
    H = tl.where(level == 7, H7, H)
    W = tl.where(level == 7, W7, W)
    start = tl.where(level == 7, end, start)
    return H, W, start


@triton.jit
def load_reference(reference_ptr, level, active, FORM: tl.constexpr, index: tl.constexpr):
    """One coordinate of the reference point or box of each query, (BLOCK_Q,); zeros where there is none."""
    if index < FORM:
        value = tl.load(reference_ptr + level * FORM + index, mask=active, other=0.0)
    else:
        value = tl.where(active, 0.0, 0.0)
    return value


@triton.jit
def pixel_coordinates(x, y, cx, cy, w, h, W, H, P: tl.constexpr, FORM: tl.constexpr):
    """(x, y) in pixels of the level, cell centres at integers, from a location or an offset."""
    if FORM == 0:
        x_px = x * W - 0.5
        y_px = y * H - 0.5
    elif FORM == 2:
        x_px = cx * W + (x - 0.5)
        y_px = cy * H + (y - 0.5)
    else:
        x_px = (cx + x * (0.5 / P) * w) * W - 0.5
        y_px = (cy + y * (0.5 / P) * h) * H - 0.5
    return x_px, y_px


@triton.jit
def softmax_tile(weights_ptr, active, LP: tl.constexpr, BLOCK_LP: tl.constexpr):
    """Largest logit and inverse sum of each query, (BLOCK_Q,). A row that is all -inf gets weights of 0."""
    points = tl.arange(0, BLOCK_LP)
    mask = active[:, None] & (points < LP)[None, :]
    logits = tl.load(weights_ptr[:, None] + points[None, :], mask=mask, other=float("-inf")).to(tl.float32)
    largest = tl.max(logits, axis=1)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(logits - largest[:, None]), axis=1)
    inverse = tl.where(total == 0.0, 0.0, 1.0 / total)
    return largest, inverse


@triton.jit
def corner(x0, y0, dx, dy, inside, valid_h, valid_w, H, W, start):
    """Whether corner (x0 + dx, y0 + dy) is on the map, and its cell in S (some cell of the level if not)."""
    x = x0 + dx
    y = y0 + dy
    valid = inside & (x >= 0) & (x < valid_w) & (y >= 0) & (y < valid_h)
    # clamped, not selected: Triton 3.6 fails to lay out a select here
    cell = start + tl.minimum(tl.maximum(y, 0), H - 1) * W + tl.minimum(tl.maximum(x, 0), W - 1)
    return valid, cell
