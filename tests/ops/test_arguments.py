"""Every public function refuses what is no tensor by name, with what to pass."""

import inspect

import numpy as np
import pytest
import torch

import ops
from ops import KernelConfig, MSDeformAttn, assign, assign_runs_on, ms_deform_attn, ms_deform_attn_fused, relu_dropout

SHAPES = ((4, 6), (2, 3))
ATTENTION = MSDeformAttn(16, num_levels=2, num_heads=2, num_points=3)


def tensors(**shapes):
    return {name: torch.rand(shape) for name, shape in shapes.items()}


SAMPLES = (1, 5, 2, 2, 3)
CALLS = {
    ms_deform_attn: tensors(value=(1, 30, 2, 8), sampling_locations=(*SAMPLES, 2), attention_weights=SAMPLES),
    ms_deform_attn_fused: tensors(
        value=(1, 30, 2, 8), reference_points=(1, 5, 2, 2), sampling_offsets=(*SAMPLES, 2), attention_logits=SAMPLES
    )
    | {"valid_sizes": torch.tensor([[[4, 6], [2, 3]]])},
    ATTENTION.forward: tensors(query=(1, 5, 16), reference_points=(1, 5, 2, 2), memory=(1, 30, 16)),
    ATTENTION.attend: tensors(query=(1, 5, 16), reference_points=(1, 5, 2, 2), value=(1, 30, 16)),
    assign: tensors(cost=(1, 1, 5, 2)) | {"num_targets": torch.tensor([2])},
    relu_dropout: tensors(x=(3, 4)),
}


def call(function, arguments):
    parameters = inspect.signature(function).parameters
    others = {"spatial_shapes": SHAPES, "p": 0.1, "training": True}
    return function(**arguments, **{name: given for name, given in others.items() if name in parameters})


@pytest.mark.parametrize("convert", [np.asarray, lambda tensor: tensor.tolist()], ids=["numpy", "list"])
@pytest.mark.parametrize(
    ("function", "name"), [pytest.param(f, name, id=f"{f.__name__}-{name}") for f in CALLS for name in CALLS[f]]
)
def test_what_is_no_tensor(function, name, convert):
    call(function, CALLS[function])
    given = convert(CALLS[function][name])
    kind = "list" if isinstance(given, list) else "numpy.ndarray"
    message = rf"^{name} must be a torch.Tensor; got {kind}. Pass torch.as_tensor\({name}\)$"
    with pytest.raises(TypeError, match=message):
        call(function, {**CALLS[function], name: given})


def test_every_public_function_is_here():
    functions = {getattr(ops, name) for name in ops.__all__ if inspect.isfunction(getattr(ops, name))}
    assert functions - set(CALLS) == {assign_runs_on, ops.backends}


@pytest.mark.parametrize("form", [ms_deform_attn, ms_deform_attn_fused])
@pytest.mark.parametrize("shapes", [5, (4, 6), [4, 6], np.array([4, 6]), None])
def test_shapes_that_are_no_pairs(form, shapes):
    with pytest.raises(TypeError, match=r"spatial_shapes must be L pairs \(H, W\) of ints; got .* Pass one pair"):
        form(spatial_shapes=shapes, **CALLS[form])


def test_shapes_that_are_no_integers():
    with pytest.raises(ValueError, match=r"spatial_shapes\[0\] must be a pair \(H, W\) of positive ints"):
        ms_deform_attn(spatial_shapes=[(4.5, 6), (2, 3)], **CALLS[ms_deform_attn])


@pytest.mark.parametrize("shapes", [np.array(SHAPES), [list(pair) for pair in SHAPES]])
def test_other_sequences_of_integers_are_taken(shapes):
    arguments = CALLS[ms_deform_attn]
    expected = ms_deform_attn(spatial_shapes=SHAPES, **arguments)
    assert torch.equal(ms_deform_attn(spatial_shapes=shapes, **arguments), expected)


def test_a_kernel_is_a_config_and_a_device_a_device():
    for run in (
        lambda: call(ms_deform_attn, CALLS[ms_deform_attn] | {"kernel": "triton"}),
        lambda: call(ms_deform_attn_fused, CALLS[ms_deform_attn_fused] | {"kernel": "triton"}),
        lambda: MSDeformAttn(16, kernel="triton"),
    ):
        with pytest.raises(TypeError, match=r"kernel must be an ops.KernelConfig; got str. Pass KernelConfig\("):
            run()
    assert call(ms_deform_attn, CALLS[ms_deform_attn] | {"kernel": KernelConfig()}).shape == (1, 5, 16)
    with pytest.raises(TypeError, match=r"device must be a torch.device; got str. Pass torch.device\(device\)"):
        assign_runs_on("cpu")
