"""How many warps of a kernel fit on a multiprocessor, from what it was compiled to."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_REGISTERS_A_STEP, _PARTITIONS, _SHARED_STEP = 256, 4, 128
# taken of a multiprocessor's shared memory by every block
_RESERVED_SHARED_BYTES = 1024


@dataclass(frozen=True)
class Multiprocessor:
    """What the blocks on a multiprocessor share.

    Attributes:
        max_warps, max_blocks: At a time.
        registers: Of 32 bits.
        shared_bytes: Of shared memory, for blocks.
    """

    max_warps: int
    max_blocks: int
    registers: int
    shared_bytes: int


# compute capability -> its multiprocessor, as NVIDIA's programming guide has it
MULTIPROCESSORS = {
    (8, 0): Multiprocessor(64, 32, 65_536, 164 * 1024),
    (9, 0): Multiprocessor(64, 32, 65_536, 228 * 1024),
}


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes.

    Attributes:
        num_warps: A block.
        registers: A thread.
        shared_bytes: A block.
    """

    num_warps: int
    registers: int
    shared_bytes: int


def theoretical_occupancy(kernel: Resources, multiprocessor: Multiprocessor) -> float:
    """The share of the multiprocessor's warps that can be resident, in [0, 1].

    Registers are given out a warp in steps of 256, from four partitions; shared memory in steps of 128 bytes.
    """
    steps = -(-max(kernel.registers, 1) * 32 // _REGISTERS_A_STEP)
    warps_by_registers = multiprocessor.registers // _PARTITIONS // (steps * _REGISTERS_A_STEP) * _PARTITIONS
    shared = -(-(kernel.shared_bytes + _RESERVED_SHARED_BYTES) // _SHARED_STEP) * _SHARED_STEP
    blocks = min(
        multiprocessor.max_blocks,
        multiprocessor.max_warps // kernel.num_warps,
        warps_by_registers // kernel.num_warps,
        multiprocessor.shared_bytes // shared,
    )
    return blocks * kernel.num_warps / multiprocessor.max_warps


def registers_of(cubin: Path, cuobjdump: str) -> int:
    """Registers a thread of the one kernel in a file, as `cuobjdump -res-usage` says.

    Raises:
        ValueError: It says nothing of registers.
    """
    run = subprocess.run([cuobjdump, "-res-usage", str(cubin)], capture_output=True, text=True, check=True)
    match = re.search(r"\bREG:(\d+)", run.stdout + run.stderr)
    if match is None:
        raise ValueError(f"{cuobjdump} -res-usage {cubin} names no registers: {run.stdout[:200]!r}")
    return int(match[1])
