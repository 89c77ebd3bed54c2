"""The reference operator against a loop written from the definition, and its gradients."""

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from ops import KernelConfig, MSDeformAttn, ms_deform_attn, ms_deform_attn_fused

REFERENCE = KernelConfig(backend="reference")
SHAPES = ((5, 7), (3, 4), (1, 1))


def loop_oracle(value: Tensor, spatial_shapes, sampling_locations: Tensor, attention_weights: Tensor) -> Tensor:
    """Equation 3 of the paper, one bilinear corner at a time, in Python floats (float64)."""
    N, _, M, D = value.shape
    _, Lq, _, L, P, _ = sampling_locations.shape
    output = torch.zeros(N, Lq, M, D, dtype=torch.float64)
    starts = [sum(H * W for H, W in spatial_shapes[:level]) for level in range(L)]
    for n, q, m, level, p in torch.cartesian_prod(*[torch.arange(i) for i in (N, Lq, M, L, P)]).tolist():
        H, W = spatial_shapes[level]
        x_location, y_location = sampling_locations[n, q, m, level, p].tolist()
        x, y = x_location * W - 0.5, y_location * H - 0.5
        if not (math.isfinite(x) and math.isfinite(y) and -1 < x < W and -1 < y < H):
            continue
        for row in (math.floor(y), math.floor(y) + 1):
            for column in (math.floor(x), math.floor(x) + 1):
                if 0 <= row < H and 0 <= column < W:
                    bilinear = (1 - abs(x - column)) * (1 - abs(y - row))
                    weight = bilinear * float(attention_weights[n, q, m, level, p])
                    output[n, q, m] += weight * value[n, starts[level] + row * W + column, m].double()
    return output.flatten(2)


def random_inputs(N=2, Lq=6, M=2, D=3, P=2, shapes=SHAPES, *, seed=0, low=-0.2, high=1.2):
    generator = torch.Generator().manual_seed(seed)
    S, L = sum(H * W for H, W in shapes), len(shapes)
    value = torch.randn(N, S, M, D, dtype=torch.float64, generator=generator)
    locations = torch.rand(N, Lq, M, L, P, 2, dtype=torch.float64, generator=generator) * (high - low) + low
    logits = torch.randn(N, Lq, M, L * P, dtype=torch.float64, generator=generator)
    return value, locations, logits.softmax(-1).unflatten(-1, (L, P))


@pytest.mark.parametrize(
    ("shapes", "P"),
    [(SHAPES, 2), (SHAPES, 1), (((6, 4),), 3), (((1, 1),), 1), (((1, 9), (9, 1)), 5)],
    ids=["three-levels", "one-point", "one-level", "one-pixel", "rows-and-columns"],
)
def test_forward_is_the_definition(shapes, P):
    value, locations, weights = random_inputs(shapes=shapes, P=P)
    expected = loop_oracle(value, shapes, locations, weights)
    output = ms_deform_attn(value, shapes, locations, weights, kernel=REFERENCE)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def test_borders_are_the_definition():
    value, _, _ = random_inputs(N=1, Lq=1)
    rows = []
    for H, W in SHAPES:
        xs, ys = (-0.5 / W, 0.0, 0.5 / W, 1.0, 1 + 0.5 / W), (-0.5 / H, 0.0, 0.5 / H, 1.0, 1 + 0.5 / H)
        rows.append([(x, y) for x in xs for y in ys])
    locations = torch.tensor(rows, dtype=torch.float64)  # (L, 25, 2)
    locations = locations[None, None, None].expand(1, 1, 2, -1, -1, -1)
    weights = torch.rand(1, 1, 2, len(SHAPES), 25, dtype=torch.float64) + 0.5
    output = ms_deform_attn(value, SHAPES, locations, weights, kernel=REFERENCE)
    torch.testing.assert_close(output, loop_oracle(value, SHAPES, locations, weights), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("outside", ["-0.5/W", "1+0.5/W", "nan", "inf", "-inf", "1e30", "-1e30"])
def test_outside_and_not_finite_contribute_exactly_zero(outside):
    value, locations, weights = random_inputs(low=0.1, high=0.9)
    for level, (_, W) in enumerate(SHAPES):
        x = {"-0.5/W": -0.5 / W, "1+0.5/W": 1 + 0.5 / W}.get(outside)
        locations[:, :, :, level, 0, 0] = float(outside) if x is None else x
    tensors = [tensor.requires_grad_() for tensor in (value, locations, weights)]
    output = ms_deform_attn(tensors[0], SHAPES, tensors[1], tensors[2], kernel=REFERENCE)
    kept = ms_deform_attn(value, SHAPES, locations[:, :, :, :, 1:], weights[:, :, :, :, 1:], kernel=REFERENCE)
    torch.testing.assert_close(output, kept, rtol=1e-12, atol=1e-12)
    output.sum().backward()
    assert (tensors[1].grad[:, :, :, :, 0] == 0).all()
    assert (tensors[2].grad[:, :, :, :, 0] == 0).all()
    assert all(torch.isfinite(tensor.grad).all() for tensor in tensors)
    assert (tensors[1].grad[:, :, :, :, 1] != 0).any()


def test_one_pixel_of_offset_in_x_is_one_pixel_of_the_map():
    H, W = 4, 9
    ramp = torch.arange(W, dtype=torch.float64).expand(H, W).reshape(1, H * W, 1, 1)
    reference_points = torch.full((1, 1, 1, 2), 0.5, dtype=torch.float64)
    offsets = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    outputs = [
        ms_deform_attn_fused(
            ramp,
            ((H, W),),
            reference_points,
            offset.view(1, 1, 1, 1, 1, 2),
            torch.zeros(1, 1, 1, 1, 1, dtype=torch.float64),
            kernel=REFERENCE,
        ).item()
        for offset in offsets
    ]
    centre = 0.5 * W - 0.5
    assert outputs == pytest.approx([centre, centre + 1, centre])


def test_gradients_are_right():
    value, locations, weights = random_inputs(N=1, Lq=3, M=2, D=2)
    # bilinear interpolation has a kink at pixel centres: keep finite differences off them
    for level, (H, W) in enumerate(SHAPES):
        for axis, size in ((0, W), (1, H)):
            pixels = locations[:, :, :, level, :, axis] * size - 0.5
            fraction = (pixels - pixels.floor()).clamp(0.1, 0.9)
            locations[:, :, :, level, :, axis] = (pixels.floor() + fraction + 0.5) / size
    tensors = tuple(tensor.requires_grad_() for tensor in (value, locations, weights))

    def function(value, locations, weights):
        return ms_deform_attn(value, SHAPES, locations, weights, kernel=REFERENCE)

    assert torch.autograd.gradcheck(function, tensors)


@pytest.mark.parametrize("box_dim", [2, 4])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_fused_form_is_its_composition(box_dim, padded):
    value, _, _ = random_inputs()
    N, Lq, M, L, P = 2, 6, 2, len(SHAPES), 2
    generator = torch.Generator().manual_seed(1)
    reference_points = torch.rand(N, Lq, L, box_dim, dtype=torch.float64, generator=generator)
    offsets = torch.randn(N, Lq, M, L, P, 2, dtype=torch.float64, generator=generator)
    logits = torch.randn(N, Lq, M, L, P, dtype=torch.float64, generator=generator)
    valid_sizes = torch.tensor([[(5, 7), (3, 4), (1, 1)], [(4, 3), (2, 2), (1, 1)]]) if padded else None
    output = ms_deform_attn_fused(
        value, SHAPES, reference_points, offsets, logits, valid_sizes=valid_sizes, kernel=REFERENCE
    )

    locations = torch.empty_like(offsets)
    for level, (H, W) in enumerate(SHAPES):
        for p in range(P):
            centre = reference_points[:, :, level, :2][:, :, None]
            offset = offsets[:, :, :, level, p]
            if box_dim == 2:
                step = offset / torch.tensor([W, H], dtype=torch.float64)
            else:
                step = offset / P * reference_points[:, :, level, 2:][:, :, None] / 2
            locations[:, :, :, level, p] = centre + step
    weights = logits.flatten(-2).softmax(-1).view_as(logits)
    if padded:
        value = value.clone()
        start = 0
        for level, (H, W) in enumerate(SHAPES):
            cells = value[:, start : start + H * W].unflatten(1, (H, W))
            for n in range(N):
                h, w = valid_sizes[n, level].tolist()
                cells[n, h:] = 0
                cells[n, :, w:] = 0
            start += H * W
    expected = loop_oracle(value, SHAPES, locations, weights)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def test_padding_gets_no_gradient_and_gives_no_value():
    value, _, _ = random_inputs(N=1)
    value.requires_grad_()
    arguments = (
        torch.rand(1, 6, 3, 2).double(),
        torch.randn(1, 6, 2, 3, 2, 2).double(),
        torch.randn(1, 6, 2, 3, 2).double(),
    )
    valid_sizes = torch.tensor([[(3, 5), (2, 2), (1, 1)]])
    ms_deform_attn_fused(value, SHAPES, *arguments, valid_sizes=valid_sizes, kernel=REFERENCE).sum().backward()
    grad = value.grad[0, :35].view(5, 7, 2, 3)
    assert (grad[3:] == 0).all()
    assert (grad[:, 5:] == 0).all()
    assert (grad[:3, :5] != 0).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_mixed_dtypes_compute_in_float32_and_return_the_dtype_of_value(dtype):
    value, locations, weights = random_inputs()
    value = value.to(dtype)
    output = ms_deform_attn(value, SHAPES, locations.float(), weights.to(dtype), kernel=REFERENCE)
    assert output.dtype == dtype
    expected = loop_oracle(value.double(), SHAPES, locations.float(), weights.to(dtype))
    # one rounding of the result, nothing coarser in between
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=max(1e-6, tolerance / 16))


def test_empty_batches_and_queries():
    value, locations, weights = random_inputs()
    assert ms_deform_attn(value[:0], SHAPES, locations[:0], weights[:0]).shape == (0, 6, 6)
    assert ms_deform_attn(value, SHAPES, locations[:, :0], weights[:, :0]).shape == (2, 0, 6)


def test_spatial_shapes_as_a_host_tensor():
    value, locations, weights = random_inputs()
    output = ms_deform_attn(value, torch.tensor(SHAPES), locations, weights)
    torch.testing.assert_close(output, ms_deform_attn(value, SHAPES, locations, weights), rtol=0, atol=0)


def test_module_on_the_meta_device():
    module = MSDeformAttn(16, num_levels=3, num_heads=2, num_points=2, device="meta")
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    query = torch.empty(2, 6, 16, device="meta")
    memory = torch.empty(2, 48, 16, device="meta")
    points = torch.empty(2, 6, 3, 2, device="meta")
    assert module(query, points, memory, SHAPES).shape == (2, 6, 16)


def test_module_starts_with_uniform_weights_and_one_direction_a_head():
    module = MSDeformAttn(32, num_levels=2, num_heads=8, num_points=4)
    assert (module.attention_weights.bias == 0).all()
    bias = module.sampling_offsets.bias.view(8, 2, 4, 2)
    torch.testing.assert_close(bias[0, 0], torch.tensor([[1.0, 0], [2, 0], [3, 0], [4, 0]]))
    torch.testing.assert_close(bias[1, 1], torch.tensor([[1.0, 1], [2, 2], [3, 3], [4, 4]]))


def test_every_parameter_of_the_module_gets_a_gradient():
    module = MSDeformAttn(16, num_levels=3, num_heads=2, num_points=2)
    output = module(torch.randn(2, 6, 16), torch.rand(2, 6, 3, 2), torch.randn(2, 48, 16), SHAPES)
    output.square().sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


class TestBadInput:
    """Each message names the argument, and says what was expected and what came."""

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda v, x, w: (v[0], SHAPES, x, w), r"value must be \(N, S, M, D\); got shape \(48, 2, 3\)"),
            (lambda v, x, w: (v[:, 1:], SHAPES, x, w), r"value must hold S = sum\(H \* W\) = 48 .* got 47"),
            (lambda v, x, w: (v, SHAPES[:2], x, w), r"value must hold S = .* = 47 .* got 48"),
            (lambda v, x, w: (v.long(), SHAPES, x, w), r"value must have a floating dtype; got torch.int64"),
            (lambda v, x, w: (v, SHAPES, x[0], w), r"sampling_locations must be \(N, Lq, M, L, P, 2\)"),
            (lambda v, x, w: (v, SHAPES, x[:, :, :1], w), r"sampling_locations must be .* got shape"),
            (lambda v, x, w: (v, SHAPES, x[:, :, :, :2], w), r"sampling_locations must be .*3, 2, 2\)"),
            (lambda v, x, w: (v, SHAPES, x, w[..., 0]), r"attention_weights must be \(N, Lq, M, L, P\)"),
            (lambda v, x, w: (v, SHAPES, x, w[..., :1]), r"attention_weights must be .* got shape"),
            (lambda v, x, w: (v, SHAPES, x.int(), w), r"sampling_locations must have a floating dtype"),
            (lambda v, x, w: (v, SHAPES, x, w.to("meta")), r"attention_weights must be on cpu"),
            (lambda v, x, w: (v, (), x, w), r"spatial_shapes must hold at least one"),
            (lambda v, x, w: (v, ((5, 7), (3, 4), (1, 0)), x, w), r"spatial_shapes\[2\] must be a pair"),
            (lambda v, x, w: (v, torch.tensor(SHAPES).float(), x, w), r"spatial_shapes must be L pairs"),
            (
                lambda v, x, w: (v, torch.tensor(SHAPES).to("meta"), x, w),
                r"spatial_shapes must live on the host",
            ),
        ],
    )
    def test_weights_form(self, change, message):
        with pytest.raises(ValueError, match=message):
            ms_deform_attn(*change(*random_inputs()))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"reference_points": torch.rand(2, 6, 3, 3)}, r"reference_points must end in 2 .* or 4"),
            ({"reference_points": torch.rand(2, 6, 2, 2)}, r"reference_points must be \(N, Lq, L, 2 or 4\)"),
            ({"sampling_offsets": torch.rand(2, 6, 2, 3, 2, 3)}, r"sampling_offsets must be"),
            ({"attention_logits": torch.rand(2, 6, 2, 6)}, r"attention_logits must be \(N, Lq, M, L, P\)"),
            ({"valid_sizes": torch.rand(2, 3, 2)}, r"valid_sizes must"),
            ({"valid_sizes": torch.ones(2, 2, 2, dtype=torch.int64)}, r"valid_sizes must"),
        ],
    )
    def test_fused_form(self, change, message):
        arguments = {
            "reference_points": torch.rand(2, 6, 3, 2),
            "sampling_offsets": torch.rand(2, 6, 2, 3, 2, 2),
            "attention_logits": torch.rand(2, 6, 2, 3, 2),
        }
        with pytest.raises(ValueError, match=message):
            ms_deform_attn_fused(torch.rand(2, 48, 2, 3), SHAPES, **{**arguments, **change})

    @pytest.mark.parametrize(
        ("field", "given"), [("backend", "cudnn"), ("accumulator", "bf16"), ("deterministic", "yes")]
    )
    def test_kernel_config(self, field, given):
        with pytest.raises(ValueError, match=rf"KernelConfig\.{field} must be .* got '{given}'"):
            KernelConfig(**{field: given})

    def test_module(self):
        with pytest.raises(ValueError, match="d_model=10 must be a multiple of num_heads=4"):
            MSDeformAttn(10, num_heads=4)
        module = MSDeformAttn(16, num_levels=2, num_heads=2)
        with pytest.raises(ValueError, match=r"spatial_shapes must hold 2 levels.* got 3"):
            module(torch.rand(1, 2, 16), torch.rand(1, 2, 3, 2), torch.rand(1, 48, 16), SHAPES)


def test_import_is_light():
    """No training library, no kernel compiler at work, no CUDA context: `ops` is usable alone."""
    program = (
        "import sys, ops, torch\n"
        "heavy = {'hydra', 'omegaconf', 'timm', 'pycocotools', 'wandb', 'detr'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert not torch.cuda.is_initialized()\n"
        "ops.backends()\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
