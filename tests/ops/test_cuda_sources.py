"""The CUDA kernels where there is no GPU: they compile, hold the instructions that were meant, and fit the GPU."""

import re
import threading

import pytest
import torch

from ops.msda.cuda.compiler import CompileError, compile_kernel, compile_ptx, nearest_architecture
from ops.msda.cuda.plan import (
    Maps,
    Signature,
    backward_launches,
    collect32_launches,
    dots32_launch,
    forward_launch,
    geometry,
    scatter32_launch,
)
from ops.msda.tuning.launch_shape import LaunchShape
from ops.msda.tuning.shape_class import shape_class, sums_of
from ops.msda.tuning.shipped import shipped_tuning
from ops.msda.tuning.table import Device

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings comes with torch's CUDA wheels")

SHAPES = ((100, 167), (50, 84), (25, 42), (13, 21))
LQ = sum(H * W for H, W in SHAPES)
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
H200 = Device("NVIDIA H200", (9, 0), 132, 232_448)
FORWARD = LaunchShape("forward", warps=4, min_blocks=8, unroll=2)


def launches(signature, needs=(True, True, True, False), accumulator="float32", deterministic=False, M=8):
    """Those of the shipped table for two images of an encoder."""
    sums = sums_of(signature.value, accumulator, deterministic)

    def shapes(direction, sums):
        sizes = ((2, LQ, M, signature.D), LQ, SHAPES, signature.P)
        return shipped_tuning(H200).choice(shape_class(direction, signature.value, *sizes, sums, 132)).cuda

    (forward,) = shapes("forward", None)
    maps = Maps(SHAPES, 2, H200.multiprocessors)
    backward = shapes("backward", sums)
    return (
        forward_launch(signature, M, LQ, forward, maps),
        *backward_launches(signature, M, LQ, SHAPES, needs, sums, backward, H200.max_shared, maps),
    )


@pytest.fixture(scope="module")
def kernel_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("signature", "options"),
    [
        (Signature(BF16, F32, BF16, 0, 4, 32), {}),
        (Signature(BF16, BF16, BF16, 2, 4, 32), {"accumulator": "native"}),
        (Signature(F16, F16, F32, 4, 4, 32), {"accumulator": "native", "needs": (True,) * 4}),
        (Signature(F32, F32, F32, 0, 4, 32), {}),
        (Signature(BF16, F32, BF16, 0, 4, 32), {"deterministic": True, "needs": (True, False, False, False)}),
        (Signature(BF16, F32, F32, 4, 3, 33), {"accumulator": "native", "needs": (True,) * 4}),
        (Signature(F32, F32, F32, 0, 5, 20), {}),
        (Signature(F16, F32, F16, 0, 1, 8), {}),
    ],
    ids=lambda value: "-".join(map(str, value.__dict__.values())) if isinstance(value, Signature) else "",
)
def test_compiles(kernel_cache, signature, options, architecture):
    for launch in launches(signature, **options):
        assert compile_kernel(launch.instance, architecture, cache_dir=kernel_cache).image[:4] == b"\x7fELF"


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    "signature",
    [Signature(BF16, F32, BF16, 0, 4, 32), Signature(F16, F16, F32, 2, 8, 32), Signature(F32, F32, F32, 4, 4, 32)],
)
def test_gradients_of_few_queries_compile(kernel_cache, signature, architecture):
    (launch,) = collect32_launches(signature, 300, SHAPES, LaunchShape("collect32", warps=8), H200.max_shared)
    assert compile_kernel(launch.instance, architecture, cache_dir=kernel_cache).image[:4] == b"\x7fELF"


def ptx(name, signature, **options):
    (launch,) = [launch for launch in launches(signature, **options) if f"::{name}<" in launch.instance]
    return compile_ptx(launch.instance, "compute_90")


@pytest.mark.parametrize(
    ("name", "dtype", "accumulator", "D", "meant", "unwanted"),
    [
        ("scatter32", BF16, "float32", 32, r"\bred\.\S*v4\.f32", r"\bred\.\S*bf16x2"),
        ("scatter32", BF16, "native", 32, r"\bred\.\S*v2\.bf16x2", r"\bred\.\S*f32"),
        ("scatter32", F16, "native", 32, r"\bred\.\S*v2\.f16x2", r"\bred\.\S*f32"),
        ("backward", BF16, "native", 33, r"\bred\.\S*bf16x2", r"\batom\.\S*cas"),
        ("backward", F32, "float32", 20, r"\bred\.\S*v4\.f32", r"\batom\.\S*cas"),
    ],
)
def test_accumulators_are_the_reductions_that_were_meant(name, dtype, accumulator, D, meant, unwanted):
    text = ptx(name, Signature(dtype, F32, dtype, 0, 4, D), accumulator=accumulator)
    assert re.search(meant, text)
    assert not re.search(unwanted, text)


def test_private_sums_are_integer_reductions_in_shared_memory():
    text = ptx("scatter32", Signature(BF16, F32, BF16, 0, 4, 32))
    assert re.search(r"\bred\.shared\S*\.s32", text)
    assert not re.search(r"\b(red|atom)\.shared\S*\.f32", text)


def test_dots_of_16_bit_values_are_on_the_tensor_cores():
    assert "mma.sync.aligned.m16n8k16" in ptx("dots32", Signature(BF16, F32, BF16, 0, 4, 32))


@pytest.mark.parametrize(("name", "D"), [("scatter32", 32), ("backward", 20)])
def test_deterministic_sums_are_64_bit_integers(name, D):
    text = ptx(name, Signature(BF16, F32, BF16, 0, 4, D), deterministic=True)
    assert re.search(r"\bred\.\S*u64", text)
    assert not re.search(r"\bred\.global\S*f32", text)


def test_cache_is_keyed_by_architecture_and_survives_a_race(tmp_path):
    instance = forward_launch(Signature(F32, F32, F32, 0, 1, 8), 1, 10, FORWARD).instance
    threads = [
        threading.Thread(target=compile_kernel, args=(instance, "sm_90"), kwargs={"cache_dir": tmp_path})
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(tmp_path.glob("cuda/*"))) == 1
    (cubin,) = tmp_path.glob("cuda/*.cubin")
    stamp = cubin.stat().st_mtime_ns
    compile_kernel(instance, "sm_90", cache_dir=tmp_path)
    assert cubin.stat().st_mtime_ns == stamp
    compile_kernel(instance, "sm_80", cache_dir=tmp_path)
    assert len(list(tmp_path.glob("cuda/*.cubin"))) == 2


def test_a_cache_that_cannot_be_written_is_said_and_done_without(tmp_path, caplog):
    (tmp_path / "cuda").write_text("not a folder")
    instance = forward_launch(Signature(F32, F32, F32, 0, 1, 8), 1, 10, FORWARD).instance
    assert compile_kernel(instance, "sm_90", cache_dir=tmp_path).image
    assert "compiled kernels are not kept" in caplog.text


def test_a_gpu_newer_than_nvrtc_gets_ptx(caplog):
    assert nearest_architecture(9, 0) == "sm_90"
    assert nearest_architecture(99, 0).startswith("compute_")
    assert "newer than NVRTC" in caplog.text
    with pytest.raises(CompileError, match=r"compute capability 3\.5"):
        nearest_architecture(3, 5)


def test_a_kernel_that_does_not_compile_says_which(tmp_path):
    with pytest.raises(CompileError, match=r"msda::forward<nonsense> does not compile for sm_90"):
        compile_kernel("msda::forward<nonsense>", "sm_90", cache_dir=tmp_path)


@pytest.mark.parametrize("D", [1, 7, 8, 16, 20, 32, 33, 48, 64, 96, 256])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_geometry_covers_the_channels_in_aligned_accesses(dtype, D):
    shape = geometry(dtype, D)
    assert D % shape.vector == 0
    assert shape.vector * dtype.itemsize <= 16
    assert shape.lanes in (4, 8, 16, 32)


@pytest.mark.parametrize("M", [1, 2, 3, 8])
def test_blocks_cover_every_query_and_head(M):
    launch = forward_launch(Signature(BF16, F32, BF16, 0, 4, 32), M, 301, FORWARD)
    assert M % launch.heads == 0
    assert launch.chunk * launch.num_chunks >= 301 > launch.chunk * (launch.num_chunks - 1)


class TestScatter:
    SIGNATURE = Signature(BF16, F32, BF16, 0, 4, 32)

    def launch(self, Lq, max_shared=H200.max_shared, **options):
        shape = LaunchShape("scatter32", **({"warps": 16, "min_blocks": 2, "tile_px": 14} | options))
        return scatter32_launch(self.SIGNATURE, Lq, SHAPES, "float32", shape, max_shared)

    def test_tiles_for_an_encoder_only(self):
        encoder = self.launch(LQ)
        assert encoder.tiles == (12, 8)
        assert encoder.num_chunks == 96
        assert 2 * (encoder.dynamic_shared + 4608 + 1024) <= 228 * 1024
        other = self.launch(LQ - 1)
        assert other.tiles == (0, 0)
        assert other.chunk * other.num_chunks >= LQ - 1 > other.chunk * (other.num_chunks - 1)

    def test_no_windows(self):
        launch = self.launch(300, warps=4, min_blocks=4, tile_px=0)
        assert launch.max_cells == 0
        assert launch.tiles == (0, 0)
        assert launch.chunk * launch.num_chunks >= 300

    @pytest.mark.parametrize(("warps", "min_blocks"), [(4, 1), (16, 2), (24, 1), (32, 1), (10, 3), (8, 4)])
    def test_blocks_fit_the_multiprocessor(self, warps, min_blocks):
        launch = self.launch(LQ, warps=warps, min_blocks=min_blocks)
        assert min_blocks * (launch.dynamic_shared + 4608) + (min_blocks - 1) * 1024 <= H200.max_shared
        assert launch.max_cells > 0

    def test_too_little_shared_memory_is_an_error_with_the_way_out(self):
        with pytest.raises(ValueError, match=r"scatter32 16 warps x 2, 14 px leaves .* Take fewer warps or blocks"):
            self.launch(LQ, max_shared=80_000)


class TestCollect:
    SIGNATURE = Signature(BF16, F32, BF16, 0, 4, 32)
    SHAPE = LaunchShape("collect32", warps=8)

    def launches(self, Lq):
        shapes = (LaunchShape("dots32", 4, 7), self.SHAPE, LaunchShape("scatter32", 4, 4))
        needs = (True, True, True, False)
        plans = backward_launches(self.SIGNATURE, 8, Lq, SHAPES, needs, "float32", shapes, H200.max_shared)
        return [plan.instance.partition("<")[0].removeprefix("msda::") for plan in plans], plans

    def test_every_cell_is_some_blocks(self):
        names, (_, launch) = self.launches(300)
        assert names == ["dots32", "collect32"]
        assert launch.num_chunks == 5 + 2 + 1 + 1
        assert launch.writes_value

    def test_more_samples_than_a_block_holds_go_to_global_memory(self):
        names, _ = self.launches(2000)
        assert names == ["dots32", "scatter32"]


class TestTiles:
    """Blocks that go through tiles of an encoder's queries."""

    def launch(self, N=8, M=8, dtype=F32, tile_px=8, Lq=LQ, shapes=SHAPES, kernel="forward"):
        shape, maps = LaunchShape(kernel, warps=20, tile_px=tile_px), Maps(shapes, N, 132)
        signature = Signature(dtype, F32, dtype, 2, 4, 32)
        if kernel == "forward":
            return forward_launch(signature, M, Lq, shape, maps)
        return dots32_launch(signature, M, Lq, len(shapes), True, shape, maps)

    @pytest.mark.parametrize("shapes", [SHAPES, ((71, 313),), ((5, 7), (90, 40), (5, 7))])
    @pytest.mark.parametrize(("N", "M"), [(1, 1), (1, 8), (2, 8), (8, 8), (64, 8)])
    def test_every_tile_is_some_blocks_and_its_list_fits(self, N, M, shapes):
        launch = self.launch(N, M, shapes=shapes, Lq=sum(H * W for H, W in shapes))
        columns, rows = launch.tiles
        num_tiles = columns * rows
        assert launch.chunk * launch.num_chunks >= num_tiles > launch.chunk * (launch.num_chunks - 1)
        assert launch.dynamic_shared <= 24 * 1024

        def side(length, tiles, tile):
            return length * (tile + 1) // tiles - length * tile // tiles

        sizes = [
            sum(side(W, columns, x) * side(H, rows, y) for H, W in shapes) for y in range(rows) for x in range(columns)
        ]
        assert sum(sizes) == sum(H * W for H, W in shapes)
        longest = max(sum(sizes[i : i + launch.chunk]) for i in range(0, num_tiles, launch.chunk))
        assert longest <= launch.max_cells

    def test_blocks_fill_the_gpu(self):
        for N in (1, 2, 8):
            launch = self.launch(N)
            blocks = N * 8 * launch.num_chunks
            waves = -(-blocks // 132)
            assert blocks > 0.9 * waves * 132

    def test_other_queries_come_in_order(self):
        launch = self.launch(Lq=LQ - 1)
        assert launch.tiles == (0, 0)
        assert launch.instance.endswith("false>")
        assert launch.chunk * launch.num_chunks >= LQ - 1

    @pytest.mark.parametrize("kernel", ["forward", "dots32"])
    def test_compiles(self, kernel_cache, kernel):
        launch = self.launch(kernel=kernel, dtype=BF16)
        assert launch.instance.endswith("true>")
        assert compile_kernel(launch.instance, "sm_90", cache_dir=kernel_cache).image[:4] == b"\x7fELF"
