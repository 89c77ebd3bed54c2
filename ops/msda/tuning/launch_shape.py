"""What tuning chooses: how a kernel is cut into blocks. Any choice gives right results; only the speed differs."""

from dataclasses import dataclass

# the templates of csrc/, and the Triton kernels of either direction
KERNELS = ("forward", "backward", "dots32", "scatter32", "collect32", "triton")
TUNED_BACKENDS = ("cuda", "triton")
_MAX_WARPS = 32
# what the CUDA backend may run, in order; of two kernels for one thing the first that can take the problem runs
_COMBINATIONS = (
    ("forward",),
    ("backward",),
    ("dots32", "scatter32"),
    ("dots32", "collect32", "scatter32"),
)


@dataclass(frozen=True)
class LaunchShape:
    """One kernel's launch shape.

    Attributes:
        kernel: One of `KERNELS`.
        warps: A block.
        min_blocks: Blocks that a multiprocessor must hold, which bounds registers, and shared memory in scatter32.
        unroll: forward and backward: points in flight.
        tile_px: Side of a tile in pixels of the finest level. forward, dots32: blocks go through an encoder's queries
            tile by tile; 0: in their order. scatter32: a tile a block; 0: no windows, everything to global memory.
        queries: triton: a block.

    Raises:
        ValueError: A kernel that does not exist, or a number out of range.
    """

    kernel: str
    warps: int
    min_blocks: int = 1
    unroll: int = 1
    tile_px: int = 0
    queries: int = 0

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(KERNELS)}; got {self.kernel!r}")
        limits = {"warps": (1, _MAX_WARPS), "min_blocks": (1, 32), "unroll": (1, 16), "tile_px": (0, 256)}
        # a Triton block is a power of two
        limits["queries"] = (1, 1024) if self.kernel == "triton" else (0, 0)
        for name, (low, high) in limits.items():
            number = getattr(self, name)
            if type(number) is not int or not low <= number <= high:
                raise ValueError(f"{self.kernel}: {name} must be {low} to {high}; got {number!r}")
        if self.queries & (self.queries - 1):
            raise ValueError(f"triton: queries must be a power of two; got {self.queries}")

    def __str__(self) -> str:
        text = f"{self.kernel} {self.warps} warps"
        if self.kernel == "triton":
            return f"{text}, {self.queries} queries"
        text += f" x {self.min_blocks}"
        if self.kernel == "scatter32":
            return f"{text}, {self.tile_px} px" if self.tile_px else f"{text}, no windows"
        if self.kernel in ("forward", "backward"):
            text += f", {self.unroll} points"
        return f"{text}, {self.tile_px} px" if self.tile_px else text


@dataclass(frozen=True)
class Choice:
    """What runs a shape class on one GPU.

    Attributes:
        backend: What `auto` takes, if it can run.
        cuda: The CUDA backend's kernels, in order; of collect32 and scatter32 the first that can take the problem runs.
        triton: The Triton backend's kernel.

    Raises:
        ValueError: Kernels that do not belong together.
    """

    backend: str
    cuda: tuple[LaunchShape, ...]
    triton: LaunchShape

    def __post_init__(self) -> None:
        if self.backend not in TUNED_BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(TUNED_BACKENDS)}; got {self.backend!r}")
        kernels = tuple(shape.kernel for shape in self.cuda)
        if kernels not in _COMBINATIONS:
            allowed = "; ".join(" and ".join(combination) for combination in _COMBINATIONS)
            raise ValueError(f"cuda must be one of {allowed}; got {', '.join(kernels)}")
        if self.triton.kernel != "triton":
            raise ValueError(f"triton must be a launch shape of triton; got {self.triton.kernel}")

    def launch_shapes(self, backend: str) -> tuple[LaunchShape, ...]:
        """Those of one of `TUNED_BACKENDS`."""
        return self.cuda if backend == "cuda" else (self.triton,)
