"""Launch shapes that come with the package: measured on the GPUs listed here, careful ones for every other."""

from ops.msda.tuning.launch_shape import Choice, LaunchShape
from ops.msda.tuning.table import Device, Row, Tuning

_TRITON = LaunchShape("triton", warps=2, queries=16)
_GENERAL = (LaunchShape("backward", warps=4, min_blocks=4, unroll=2),)
_FORWARD_16 = (LaunchShape("forward", warps=4, min_blocks=9, unroll=2),)
_FORWARD_32 = (LaunchShape("forward", warps=4, min_blocks=8, unroll=4),)
# an encoder's float32 rows fill the L1 only if neighbours are read together
_FORWARD_32_TILED = (LaunchShape("forward", warps=32, unroll=2, tile_px=8),)
_DOTS_32_TILED = LaunchShape("dots32", warps=24, tile_px=8)
# for a decoder, and where it has too many samples for a block's shared memory
_FEW = (LaunchShape("collect32", warps=16, min_blocks=2), LaunchShape("scatter32", warps=4, min_blocks=4))
_DOTS_16 = LaunchShape("dots32", warps=4, min_blocks=7)
_DOTS_32 = LaunchShape("dots32", warps=4, min_blocks=6)


def is_measured(device: Device) -> bool:
    """Whether the shipped launch shapes were measured on a GPU of this kind."""
    return device.capability == (9, 0)


def shipped_tuning(device: Device) -> Tuning:
    """The table of a device: the first row that matches a shape class, and the last ones match all."""
    if is_measured(device):
        # one H200, docs/kernels.md; cuda is ahead of triton in every table of docs/benchmarks but in the float32
        # forward at uniform locations (1.06x its time), which have an encoder's shape class
        scatter = LaunchShape("scatter32", warps=16, min_blocks=2, tile_px=14)
        # reductions in 64 bits cost twice as much: larger windows
        wide = LaunchShape("scatter32", warps=24, min_blocks=1, tile_px=18)
        encoder = (
            Row(Choice("cuda", _FORWARD_32_TILED, _TRITON), "forward", 4, None, "encoder", fits32=True),
            Row(Choice("cuda", (_DOTS_16, wide), _TRITON), "backward", 2, "fixed", "encoder", fits32=True),
            Row(Choice("cuda", (_DOTS_32_TILED, wide), _TRITON), "backward", 4, "fixed", "encoder", fits32=True),
            Row(Choice("cuda", (_DOTS_32_TILED, scatter), _TRITON), "backward", 4, None, "encoder", fits32=True),
        )
        return Tuning(encoder + _rows(scatter))
    return Tuning(_rows(_careful_scatter(device.max_shared)))


def _rows(scatter: LaunchShape) -> tuple[Row, ...]:
    return (
        Row(Choice("cuda", _FORWARD_16, _TRITON), direction="forward", value_bytes=2),
        Row(Choice("cuda", _FORWARD_32, _TRITON), direction="forward", value_bytes=4),
        Row(Choice("cuda", (_DOTS_16, *_FEW), _TRITON), "backward", 2, None, "decoder", fits32=True),
        Row(Choice("cuda", (_DOTS_32, *_FEW), _TRITON), "backward", 4, "fixed", "decoder", fits32=True),
        # float32 has nothing to convert: one launch instead of two is what counts
        Row(Choice("cuda", _GENERAL, _TRITON), direction="backward", regime="decoder"),
        Row(Choice("cuda", (_DOTS_16, scatter), _TRITON), direction="backward", value_bytes=2, fits32=True),
        Row(Choice("cuda", (_DOTS_32, scatter), _TRITON), direction="backward", value_bytes=4, fits32=True),
        Row(Choice("cuda", _GENERAL, _TRITON), direction="backward"),
    )


def _careful_scatter(max_shared: int) -> LaunchShape:
    """For a GPU nobody measured: windows of about the size that was best on an H200, in fewer or smaller blocks."""
    # two blocks of 16 warps keep 608 cells in 227 KiB (H100, B200); one keeps 1,000 in 163 KiB (A100), one of 12
    # warps 560 in 99 KiB (consumer GPUs)
    if max_shared >= 220 * 1024:
        return LaunchShape("scatter32", warps=16, min_blocks=2, tile_px=14)
    if max_shared >= 120 * 1024:
        return LaunchShape("scatter32", warps=16, min_blocks=1, tile_px=16)
    if max_shared >= 90 * 1024:
        return LaunchShape("scatter32", warps=12, min_blocks=1, tile_px=12)
    return LaunchShape("scatter32", warps=4, min_blocks=4)
