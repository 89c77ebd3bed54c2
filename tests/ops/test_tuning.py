"""Which launch shapes and backend run a shape class: the shipped tables, and what was tuned on this machine."""

import itertools
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ops.msda.cuda.plan import Maps, Signature, backward_launches, forward_launch
from ops.msda.tuning import store
from ops.msda.tuning.device import tuning_of
from ops.msda.tuning.launch_shape import Choice, LaunchShape
from ops.msda.tuning.shape_class import ShapeClass, shape_class, sums_of
from ops.msda.tuning.shipped import shipped_tuning
from ops.msda.tuning.store import TunedClass, TuningFile, TuningFileError, read_tuning, tuning_path, write_tuning
from ops.msda.tuning.table import Device

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SHAPES = ((100, 167), (50, 84), (25, 42), (13, 21))
S = sum(H * W for H, W in SHAPES)
H200 = Device("NVIDIA H200", (9, 0), 132, 232_448)
DEVICES = [
    H200,
    Device("NVIDIA B200", (10, 0), 148, 232_448),
    Device("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166_912),
    Device("NVIDIA GeForce RTX 3060", (8, 6), 28, 101_376),
    Device("NVIDIA GeForce RTX 5090", (12, 0), 170, 101_376),
    Device("a GPU of tomorrow", (99, 0), 1, 49_152),
]
ENCODER = ShapeClass("backward", 2, "float32", "encoder", 32, True)
WINNER = Choice(
    "cuda",
    (LaunchShape("dots32", 8, 3), LaunchShape("scatter32", 24, 1, tile_px=20)),
    LaunchShape("triton", 4, queries=32),
)
TUNED = TuningFile((TunedClass(ENCODER, WINNER, 1.5, 2.0),), {"driver": "1.2"})


def classes():
    for regime, (head_dim, fits32), size in itertools.product(
        ("encoder", "decoder", "other"), ((32, True), (32, False), (20, False)), (2, 4)
    ):
        yield ShapeClass("forward", size, None, regime, head_dim, fits32)
        for sums in ("float32", "native", "fixed"):
            yield ShapeClass("backward", size, sums, regime, head_dim, fits32)


class TestShapeClass:
    def of(self, N=2, Lq=S, M=8, D=32, P=4, shapes=SHAPES, multiprocessors=132, dtype=BF16):
        cells = sum(H * W for H, W in shapes)
        return shape_class("forward", dtype, (N, cells, M, D), Lq, shapes, P, None, multiprocessors)

    def test_regimes(self):
        assert self.of().regime == "encoder"
        assert self.of(Lq=S - 1).regime == "other"
        assert self.of(Lq=300).regime == "decoder"
        # 256 (query, head) pairs a multiprocessor are the boundary
        assert self.of(N=1, M=1, Lq=256, multiprocessors=1).regime == "other"
        assert self.of(N=1, M=1, Lq=255, multiprocessors=1).regime == "decoder"
        assert self.of(N=64, Lq=300).regime == "other"

    def test_image_sizes_and_batches_share_a_class(self):
        small = ((50, 60), (25, 30), (13, 15), (7, 8))
        assert self.of(Lq=sum(H * W for H, W in small), shapes=small) == self.of() == self.of(N=16)

    @pytest.mark.parametrize(("sizes", "fits"), [({}, True), ({"P": 8}, True), ({"P": 3}, False), ({"D": 64}, False)])
    def test_what_the_kernels_for_32_channels_take(self, sizes, fits):
        assert self.of(**sizes).fits32 is fits
        assert not self.of(shapes=((2, 2),) * 16, P=12).fits32

    def test_sums(self):
        assert sums_of(F32, "native", False) == "float32"
        assert sums_of(BF16, "native", False) == "native"
        assert sums_of(BF16, "native", True) == "fixed"

    def test_names_are_checked(self):
        with pytest.raises(ValueError, match="regime must be one of encoder, decoder, other; got 'x'"):
            replace(ENCODER, regime="x")
        with pytest.raises(ValueError, match="value_bytes"):
            replace(ENCODER, value_bytes=8)


class TestLaunchShape:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"kernel": "gather"},
            {"warps": 0},
            {"warps": 33},
            {"warps": 4.0},
            {"warps": True},
            {"unroll": 0},
            {"tile_px": -1},
            {"queries": 16},
            {"kernel": "triton"},
            {"kernel": "triton", "queries": 24},
        ],
    )
    def test_what_no_kernel_can_be_launched_with_is_refused(self, wrong):
        with pytest.raises(ValueError, match="must be"):
            LaunchShape(**({"kernel": "forward", "warps": 4} | wrong))

    def test_kernels_that_do_not_belong_together(self):
        dots, scatter = WINNER.cuda
        for cuda in ((), (dots,), (scatter, dots), (scatter,), (WINNER.triton,)):
            with pytest.raises(ValueError, match=r"cuda must be one of forward; .*dots32 and scatter32"):
                replace(WINNER, cuda=cuda)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_gpu_has_launches_for_every_class(device):
    """Also one that nobody has seen: what it takes fits its shared memory."""
    for kind in classes():
        choice = shipped_tuning(device).choice(kind)
        store.check_choice(kind, choice)
        assert choice.backend == "cuda"
        dtype = BF16 if kind.value_bytes == 2 else F32
        signature = Signature(dtype, F32, dtype, 0, 4 if kind.fits32 else 3, kind.head_dim)
        Lq = {"encoder": S, "decoder": 300, "other": 5000}[kind.regime]
        maps = Maps(SHAPES, 2, device.multiprocessors)
        if kind.direction == "forward":
            plans = (forward_launch(signature, 8, Lq, choice.cuda[0], maps),)
        else:
            needs = (True, True, True, False)
            plans = backward_launches(signature, 8, Lq, SHAPES, needs, kind.sums, choice.cuda, device.max_shared, maps)
            assert [plan.instance.partition("<")[0] for plan in plans] in (
                ["msda::backward"],
                ["msda::dots32", "msda::scatter32"],
                ["msda::dots32", "msda::collect32"],
            )
        assert all(plan.dynamic_shared <= device.max_shared - 4608 or plan.dynamic_shared == 0 for plan in plans)


def test_the_table_of_hopper_is_what_was_measured():
    table = shipped_tuning(H200)
    scatter = LaunchShape("scatter32", 16, 2, tile_px=14)
    assert table.choice(ENCODER).cuda == (LaunchShape("dots32", 4, 7), scatter)
    assert table.choice(replace(ENCODER, value_bytes=4)).cuda == (LaunchShape("dots32", 24, tile_px=8), scatter)
    assert table.choice(replace(ENCODER, value_bytes=4, regime="other")).cuda == (LaunchShape("dots32", 4, 6), scatter)
    assert table.choice(replace(ENCODER, sums="fixed")).cuda[1] == LaunchShape("scatter32", 24, 1, tile_px=18)
    few = (LaunchShape("dots32", 4, 7), LaunchShape("collect32", 16, 2), LaunchShape("scatter32", 4, 4))
    assert table.choice(replace(ENCODER, regime="decoder")).cuda == few
    general = (LaunchShape("backward", 4, 4, unroll=2),)
    assert table.choice(replace(ENCODER, regime="decoder", value_bytes=4)).cuda == general
    assert table.choice(replace(ENCODER, regime="decoder", head_dim=64, fits32=False)).cuda == general
    forward = ShapeClass("forward", 2, None, "decoder", 64, False)
    assert table.choice(forward).cuda == (LaunchShape("forward", 4, 9, unroll=2),)


class TestFile:
    @pytest.fixture
    def path(self, tmp_path):
        path = tuning_path(H200, tmp_path)
        write_tuning(path, H200, TUNED)
        return path

    def test_comes_back_as_it_was_written(self, path, tmp_path):
        assert path == tmp_path / "tuning" / "nvidia-h200.json"
        assert read_tuning(path, H200) == TUNED

    def test_overrides_its_classes_and_no_other(self, path, tmp_path, caplog):
        with caplog.at_level(logging.INFO, logger="ops"):
            tuning = tuning_of(H200, tmp_path)
        assert [record.getMessage() for record in caplog.records] == [
            f"launch shapes of 1 shape classes come from {path}"
        ]
        assert tuning.choice(ENCODER) == WINNER
        assert tuning.source == "tuned (nvidia-h200.json, no date)"
        for kind in set(classes()) - {ENCODER}:
            assert tuning.choice(kind) == shipped_tuning(H200).choice(kind)

    def test_none_is_the_shipped_table_without_a_word(self, tmp_path, caplog):
        with caplog.at_level(logging.INFO, logger="ops"):
            assert tuning_of(H200, tmp_path) == shipped_tuning(H200)
        assert not caplog.records

    def test_a_gpu_nobody_measured_is_told_how_to(self, tmp_path, caplog):
        device = DEVICES[-1]
        with caplog.at_level(logging.INFO, logger="ops"):
            assert tuning_of(device, tmp_path) == shipped_tuning(device)
        assert [record.getMessage() for record in caplog.records] == [
            "launch shapes for a GPU of tomorrow are careful guesses: python tools/tune_ops.py finds the fastest"
        ]

    def used(self, device, folder, caplog, reason):
        """Not used, and said so once."""
        assert tuning_of(device, folder) == shipped_tuning(device)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert reason in record.getMessage()
        assert "tools/tune_ops.py" in record.getMessage()

    @pytest.mark.parametrize("keep", [0, 1, 100, -2])
    def test_a_file_cut_short_is_not_used(self, path, tmp_path, caplog, keep):
        path.write_text(path.read_text()[:keep])
        self.used(H200, tmp_path, caplog, "cannot be read")

    @pytest.mark.parametrize(
        "edit",
        [
            lambda content: content["classes"][0]["choice"]["cuda"][0].update(warps=16),
            lambda content: content["classes"].clear(),
            lambda content: content.pop("checksum"),
            lambda content: content.update(kernels="0"),
        ],
    )
    def test_a_file_changed_by_hand_is_not_used(self, path, tmp_path, caplog, edit):
        content = json.loads(path.read_text())
        edit(content)
        path.write_text(json.dumps(content))
        self.used(H200, tmp_path, caplog, "changed by hand")

    @pytest.mark.parametrize("text", ["[]", "null", '"x"', "{}", "\x00"])
    def test_something_else_is_not_used(self, path, tmp_path, caplog, text):
        path.write_text(text)
        self.used(H200, tmp_path, caplog, "not used")

    def test_a_file_of_another_gpu_is_not_used(self, path, tmp_path, caplog):
        other = DEVICES[2]
        tuning_path(other, tmp_path).write_text(path.read_text())
        self.used(other, tmp_path, caplog, "measured on {'name': 'NVIDIA H200'")

    def test_half_a_gpu_is_another_gpu(self, path, tmp_path, caplog):
        """A MIG slice has the name of the whole."""
        self.used(replace(H200, multiprocessors=16), tmp_path, caplog, "measured on")

    def test_a_file_of_other_kernels_is_not_used(self, path, tmp_path, caplog, monkeypatch):
        monkeypatch.setattr(store, "kernel_digest", lambda: "other")
        self.used(H200, tmp_path, caplog, "other kernel sources")

    def test_a_file_of_another_format_is_not_used(self, path, tmp_path, caplog, monkeypatch):
        monkeypatch.setattr(store, "_FORMAT", 2)
        self.used(H200, tmp_path, caplog, "format 1")

    @pytest.mark.parametrize(
        "entry",
        [
            # the kernels for D = 32 where they cannot run, and the wrong direction
            replace(TUNED.classes[0], kind=replace(ENCODER, head_dim=20, fits32=False)),
            replace(TUNED.classes[0], kind=ShapeClass("forward", 2, None, "encoder", 32, True)),
        ],
    )
    def test_a_choice_that_cannot_run_its_class_is_refused(self, tmp_path, entry):
        path = tuning_path(H200, tmp_path)
        write_tuning(path, H200, replace(TUNED, classes=(entry,)))
        with pytest.raises(TuningFileError, match="does not run"):
            read_tuning(path, H200)

    def test_a_folder_that_cannot_be_read_is_said(self, tmp_path, caplog):
        tuning_path(H200, tmp_path).mkdir(parents=True)
        self.used(H200, tmp_path, caplog, "cannot be read")


@pytest.mark.parametrize(
    "name", ["cuda/csrc/common.cuh", "cuda/plan.py", "triton/backward.py", "tuning/shape_class.py"]
)
def test_the_digest_follows_the_sources(monkeypatch, tmp_path, name):
    package = tmp_path / "msda"
    shutil.copytree(Path(store.__file__).parents[1], package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(store.resources, "files", lambda _: package)
    digest = store.kernel_digest.__wrapped__()
    assert digest == store.kernel_digest(), "the same wherever the package lies"
    (package / name).write_text((package / name).read_text() + "// changed")
    assert store.kernel_digest.__wrapped__() != digest
