"""The experiment in Triton where there is no GPU: interpreted, and compiled for GPUs that are not there."""

from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is for Linux")


def test_the_experiment_through_the_interpreter(interpret):
    interpret(Path(__file__).with_name("tile_cases.py"))


@pytest.mark.parametrize("architecture", [80, 90])
def test_the_point_parallel_tiling_compiles(architecture):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from detr.benchmark.findings.tile_kernel import _tile_forward_kernel as kernel

    constants = {"D": 32, "BLOCK_Q": 1, "BLOCK_P": 16, "BLOCK_D": 32, "ORDERED": True}
    types = {"value_ptr": "*bf16", "locations_ptr": "*fp32", "weights_ptr": "*bf16", "output_ptr": "*bf16"}
    types |= {"sizes_ptr": "*i32", "order_ptr": "*i32"}
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 4})
    assert "ld.global" in compiled.asm["ptx"]
    assert compiled.asm["cubin"][:4] == b"\x7fELF"
