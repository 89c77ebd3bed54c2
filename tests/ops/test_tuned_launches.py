"""Backends run the launch shapes that the table, or who calls, has chosen."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ops.msda.cuda import backend
from ops.msda.cuda.launch import DeviceLimits, Kernel
from ops.msda.triton import backend as triton_backend
from ops.msda.tuning import device as tuning_device
from ops.msda.tuning.device import choice_for
from ops.msda.tuning.launch_shape import Choice, LaunchShape
from ops.msda.tuning.shape_class import ShapeClass
from ops.msda.tuning.table import Device, Row, Tuning
from ops.testing import Case, random_problem

SHAPES = ((100, 167), (50, 84), (25, 42), (13, 21))
S = sum(H * W for H, W in SHAPES)
H200 = Device("NVIDIA H200", (9, 0), 132, 232_448)
ENCODER = ShapeClass("backward", 2, "float32", "encoder", 32, True)
WINNER = Choice(
    "cuda",
    (LaunchShape("dots32", 8, 3), LaunchShape("scatter32", 24, 1, tile_px=20)),
    LaunchShape("triton", 4, queries=32),
)


class TestBackends:
    """The CUDA backend with a stand-in for the driver, Triton's without its kernels: what they take from the table."""

    # a table of its own, so that nothing passes by chance
    FORWARD = LaunchShape("forward", 2, 5, unroll=1)
    GENERAL = LaunchShape("backward", 8, 2, unroll=4)
    TRITON = LaunchShape("triton", 8, queries=128)
    TABLE = Tuning(
        (
            Row(Choice("cuda", (FORWARD,), TRITON), direction="forward"),
            Row(replace(WINNER, triton=TRITON), direction="backward", sums="float32", fits32=True),
            Row(Choice("cuda", (GENERAL,), TRITON), direction="backward"),
        )
    )

    @pytest.fixture
    def asked(self, monkeypatch):
        """What the table was asked for, in order; launches go to `launched`."""
        asked = []
        table = self.TABLE

        class Asked:
            def choice(self, kind):
                asked.append(kind)
                return table.choice(kind)

        self.launched = []
        caches = (backend._forward_launch, backend._backward_launches, choice_for)
        for module in (backend, tuning_device):
            monkeypatch.setattr(module, "device_tuning", lambda index: Asked())
        monkeypatch.setattr(tuning_device, "visible_device", lambda index: H200)
        monkeypatch.setattr(backend, "device_limits", lambda index: DeviceLimits(132, H200.max_shared))
        monkeypatch.setattr(backend, "_kernel", lambda instance, index: Kernel(instance, None, 1 << 20))
        monkeypatch.setattr(backend, "launch", lambda prepared, pointers: self.launched.append(prepared.kernel.name))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
        for cached in caches:
            cached.cache_clear()
        yield asked
        for cached in caches:
            cached.cache_clear()

    def problem(self, dtype=torch.bfloat16, Lq=17):
        return random_problem(Case(Lq=Lq), dtype)

    def test_forward(self, asked):
        problem, _ = self.problem()
        for _ in range(3):
            backend.forward(problem)
        assert asked == [ShapeClass("forward", 2, None, "decoder", 32, True)], "once a shape"
        assert len(self.launched) == 3
        assert set(self.launched) == {
            "msda::forward<__nv_bfloat16, float, __nv_bfloat16, 0, 4, 32, 8, 4, 2, 2, 1, 5, false>"
        }
        backend.forward(self.problem(Lq=18)[0])
        assert len(asked) == 2

    @pytest.mark.parametrize(
        ("accumulator", "deterministic", "sums", "kernels"),
        [
            ("float32", False, "float32", ["dots32<", "scatter32<"]),
            ("native", False, "native", ["backward<__nv_bfloat16, __nv_bfloat16, "]),
            ("float32", True, "fixed", ["backward<__nv_bfloat16, long long, "]),
        ],
    )
    def test_backward(self, asked, accumulator, deterministic, sums, kernels):
        problem, grad_output = self.problem()
        for _ in range(2):
            backend.backward(problem, grad_output, (True, True, True, False), accumulator, deterministic)
        assert asked == [ShapeClass("backward", 2, sums, "decoder", 32, True)]
        assert len(self.launched) == 2 * len(kernels)
        assert all(f"msda::{kernel}" in name for kernel, name in zip(kernels, self.launched, strict=False))

    def test_only_kernels_whose_gradients_are_wanted_run(self, asked):
        problem, grad_output = self.problem()
        backend.backward(problem, grad_output, (True, False, False, False), "float32", False)
        backend.backward(problem, grad_output, (False, True, False, False), "float32", False)
        assert [name.partition("<")[0] for name in self.launched] == ["msda::scatter32", "msda::dots32"]

    def test_launch_shapes_that_are_given_are_taken(self, asked):
        problem, grad_output = self.problem()
        backend.forward(problem, (LaunchShape("forward", 8, 3, unroll=4),))
        backend.backward(problem, grad_output, (True, True, True, False), "float32", False, (self.GENERAL,))
        assert not asked
        assert self.launched[0].endswith(" 8, 4, 3, false>")
        assert self.launched[1].startswith("msda::backward<")

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_value_gradients_that_are_written_need_no_sums(self, asked, monkeypatch, deterministic):
        problem, grad_output = self.problem()
        shapes = (LaunchShape("dots32", 4), LaunchShape("collect32", 16), LaunchShape("scatter32", 4))
        pointers = []
        monkeypatch.setattr(backend, "launch", lambda prepared, given: pointers.append((prepared, given)))
        gradients = backend.backward(problem, grad_output, (True, True, True, False), "float32", deterministic, shapes)
        assert [prepared.kernel.name.partition("<")[0] for prepared, _ in pointers] == [
            "msda::dots32",
            "msda::collect32",
        ]
        # the eighth pointer is the value gradient's: what the kernel writes is what comes back
        assert pointers[-1][1][7] == gradients.value.data_ptr()
        assert gradients.value.dtype == problem.value.dtype

    def test_no_queries_leave_no_value_gradient_unwritten(self, asked):
        problem, grad_output = self.problem(Lq=1)
        none = problem._replace(locations=problem.locations[:, :0], weights=problem.weights[:, :0])
        shapes = (LaunchShape("dots32", 4), LaunchShape("collect32", 16), LaunchShape("scatter32", 4))
        gradients = backend.backward(none, grad_output[:, :0], (True, True, True, False), "float32", False, shapes)
        assert not self.launched
        assert (gradients.value == 0).all()

    def test_triton(self, asked, monkeypatch):
        monkeypatch.setattr(triton_backend, "_interpreted", lambda: False)
        with FakeTensorMode():
            value = torch.empty(2, S, 8, 32, dtype=torch.bfloat16, device="cuda:0")
            locations = torch.empty(2, S, 8, len(SHAPES), 4, 2, device="cuda:0")
        problem = self.problem()[0]._replace(value=value, spatial_shapes=SHAPES, locations=locations)
        for _ in range(2):
            assert triton_backend._tabled(problem, "backward", "float32") == self.TRITON
        assert asked == [ENCODER]
