"""The experiment in Triton where there is no GPU: interpreted, and compiled for GPUs that are not there."""

from pathlib import Path

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is for Linux")


@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="Triton before 3.7 does not interpret loops with run-time bounds beside NumPy 2.4",
)
def test_the_experiment_through_the_interpreter(interpret):
    interpret(Path(__file__).with_name("tile_cases.py"))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_the_point_parallel_tiling_compiles(capability):
    from detr.benchmark.findings.tile_kernel import Tiling, compile_tile

    compiled = compile_tile(Tiling(1, 16), torch.bfloat16, capability, ordered=True)
    assert "ld.global" in compiled.asm["ptx"]
    assert compiled.asm["cubin"][:4] == b"\x7fELF"


def test_occupancy_of_a_gpu_that_is_not_there():
    from detr.benchmark.findings.tile_kernel import Tiling
    from detr.benchmark.findings.tiling import compiled_rows

    (row,) = compiled_rows([Tiling(1, 16)], "bf16", 2, (9, 0))
    assert row.status == "compiled for sm_90, not timed"
    assert 16 <= row.registers <= 64
    # sums over the points go through shared memory
    assert row.shared_bytes > 0
    assert row.theoretical_occupancy >= 0.5
    with pytest.raises(ValueError, match=r"compile_for must be one of .*got \(7, 0\)"):
        compiled_rows([Tiling(1, 16)], "bf16", 2, (7, 0))
