"""The Triton backend where there is no GPU: interpreted, and compiled for GPUs that are not there."""

from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is for Linux")


def test_kernels_through_the_interpreter(interpret):
    interpret(Path(__file__).with_name("triton_cases.py"))


def compile_for(kernel, architecture, *, dtype, accumulator="float32", form=0):
    """The PTX of a kernel as a call with 16-byte aligned tensors gets it, for a GPU that need not be there."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    value = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}[dtype]
    signature = {}
    for name in kernel.arg_names:
        if name in ("reference_ptr", "grad_reference_ptr", "scale_ptr"):
            signature[name] = "*fp32"
        elif name == "valid_ptr":
            signature[name] = "*i32"
        elif name == "grad_value_ptr" and accumulator == "float32":
            signature[name] = "*fp32"
        elif name.endswith("_ptr"):
            signature[name] = value
        else:
            signature[name] = "i32" if name in ("S", "Lq", "M") or name[1:].isdigit() else "constexpr"
    constants = {
        "D": 32,
        "L": 4,
        "P": 4,
        "FORM": form,
        "HAS_VALID": form != 0,
        "BLOCK_Q": 16,
        "BLOCK_D": 32,
        "BLOCK_LP": 16,
        "NEEDS_VALUE": True,
        "NEEDS_LOCATIONS": True,
        "NEEDS_WEIGHTS": True,
        "NEEDS_REFERENCE": form != 0,
        "FIXED": False,
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name.endswith("_ptr")}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={name: value for name, value in constants.items() if name in kernel.arg_names},
        attrs=aligned,
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 2}).asm["ptx"]


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("form", [0, 2, 4])
def test_forward_compiles(form, architecture):
    from ops.msda.triton.forward import _msda_forward_kernel

    text = compile_for(_msda_forward_kernel, architecture, dtype="bf16", form=form)
    assert "ld.global" in text
    assert "mul.f64" not in text


@pytest.mark.parametrize(
    ("architecture", "dtype", "accumulator", "form", "meant", "unwanted"),
    [
        (90, "bf16", "float32", 0, "add.v4.f32", "bf16"),
        (90, "bf16", "native", 2, "add.noftz.v8.bf16", "add.v4.f32"),
        (90, "fp16", "native", 4, "add.noftz.v8.f16", "add.v4.f32"),
        (90, "fp32", "float32", 4, "add.v4.f32", "bf16"),
        (80, "bf16", "float32", 0, "add.f32", "bf16"),
    ],
)
def test_backward_adds_as_was_meant(architecture, dtype, accumulator, form, meant, unwanted):
    from ops.msda.triton.backward import _msda_backward_kernel

    text = compile_for(_msda_backward_kernel, architecture, dtype=dtype, accumulator=accumulator, form=form)
    atomics = [line for line in text.splitlines() if "atom.global" in line or "red.global" in line]
    assert any(meant in line for line in atomics)
    assert not any(unwanted in line for line in atomics)
