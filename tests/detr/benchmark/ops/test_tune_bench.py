"""What a tuning bench refuses to time, without a GPU, and the work that it times."""

import pytest
import torch

from detr.benchmark.ops import tune_bench
from detr.benchmark.ops.inputs import OpCase, make_fused_inputs, make_inputs
from detr.benchmark.ops.tune import Candidate
from detr.benchmark.ops.tune_bench import tune_case
from ops.msda.cuda.compiler import CompileError
from ops.msda.cuda.launch import LaunchError
from ops.msda.reference import sampling_locations_from_offsets
from ops.msda.tuning.launch_shape import LaunchShape
from ops.msda.tuning.shape_class import ShapeClass, shape_class
from ops.testing import run_reference


class TestParityGate:
    """Candidates must be right before they are timed: with a stand-in that runs the reference."""

    SHAPE = LaunchShape("forward", warps=4)

    class Stand:
        def __init__(self, error=None, factor=1.0):
            self.error, self.factor = error, factor

        def forward(self, problem, launch_shapes):
            if self.error:
                raise self.error
            return run_reference(problem, self.grad_output(problem), torch.float32)[0] * self.factor

        def backward(self, problem, grad_output, needs, accumulator, deterministic, launch_shapes):
            gradients = run_reference(problem, grad_output, torch.float32)[1]
            # in deterministic mode a kernel that is right but not the same twice
            self.factor += 1e-7 if deterministic else 0
            return gradients._replace(value=gradients.value * self.factor, reference_points=None)

        def grad_output(self, problem):
            N, _, M, D = problem.value.shape
            return problem.value.new_zeros(N, problem.Lq, M * D)

    def failure(self, monkeypatch, stand, direction="forward", sums=None):
        monkeypatch.setattr(tune_bench, "backend_module", lambda name: stand)
        case = OpCase("decoder", 1, num_queries=5, num_heads=2, head_dim=4)
        bench = tune_bench.KernelBench(
            [case], torch.float32, direction, sums, device=torch.device("cpu"), multiprocessors=1, seed=0
        )
        assert bench.kind == ShapeClass(direction, 4, sums, "decoder", 4, False)
        return bench.failure(Candidate("cuda", (self.SHAPE,)))

    def test_right_ones_pass(self, monkeypatch):
        assert self.failure(monkeypatch, self.Stand()) is None
        assert self.failure(monkeypatch, self.Stand(), "backward", "float32") is None

    def test_wrong_ones_are_out_with_the_numbers(self, monkeypatch):
        assert "wrong: output: error 1.00e-03" in self.failure(monkeypatch, self.Stand(factor=1.001))
        reason = self.failure(monkeypatch, self.Stand(factor=1.001), "backward", "float32")
        assert "wrong: grad value: error 1.00e-03" in reason
        assert "grad weights" not in reason

    @pytest.mark.parametrize("error", [CompileError("no\nlog"), LaunchError("too many threads"), ValueError("cells")])
    def test_those_that_do_not_run_are_out_with_the_reason(self, monkeypatch, error):
        assert self.failure(monkeypatch, self.Stand(error)) == f"does not run: {str(error).splitlines()[0]}"

    def test_a_deterministic_one_must_repeat_itself(self, monkeypatch):
        assert "two runs differ" in self.failure(monkeypatch, self.Stand(), "backward", "fixed")


class TestSpreads:
    def bench(self, *cases):
        return tune_bench.KernelBench(
            cases, torch.float32, "forward", None, device=torch.device("cpu"), multiprocessors=1, seed=0
        )

    def test_times_are_means_over_the_cases(self, monkeypatch):
        """A launch shape that is fast at one spread of the offsets may be slow at the others."""
        timed = iter(([1.0, 2.0], [3.0, 6.0]))
        monkeypatch.setattr(tune_bench, "time_cuda", lambda calls, **counts: next(timed))
        monkeypatch.setattr(tune_bench, "backend_module", lambda name: None)
        bench = self.bench(*(OpCase("decoder", 1, noise_px=noise_px, num_queries=5) for noise_px in (0.5, 4.0)))
        assert bench.time_ms(Candidate("cuda", ()), 2) == [2.0, 4.0]

    def test_cases_of_two_classes_are_refused(self):
        with pytest.raises(ValueError, match="its cases are of 2"):
            self.bench(OpCase("decoder", 1, num_queries=5), OpCase("decoder", 1, num_queries=5000))


class TestWorkload:
    @pytest.mark.parametrize("multiprocessors", [4, 16, 28, 108, 132, 192])
    @pytest.mark.parametrize("regime", ["encoder", "decoder", "other"])
    def test_a_regime_is_met_on_every_gpu(self, regime, multiprocessors):
        case = tune_case(regime, OpCase("encoder", 8), multiprocessors)
        S = 22_223
        Lq = S if case.kind == "encoder" else case.num_queries
        shapes = ((100, 167), (50, 84), (25, 42), (13, 21))
        sizes = ((case.batch_size, S, 8, 32), Lq, shapes, 4)
        assert shape_class("forward", torch.bfloat16, *sizes, None, multiprocessors).regime == regime

    @pytest.mark.parametrize("kind", ["encoder", "uniform", "decoder"])
    def test_the_fused_form_has_the_same_samples(self, kind):
        case = OpCase(kind, 1, num_queries=7, num_heads=2, head_dim=4)
        device = torch.device("cpu")
        plain, plain_grad = make_inputs(case, torch.float32, device, seed=3)
        fused, grad = make_fused_inputs(case, torch.float32, device, seed=3)
        assert torch.equal(plain_grad, grad)
        assert torch.equal(plain.value, fused.value)
        locations = sampling_locations_from_offsets(fused.reference_points, fused.locations, fused.spatial_shapes)
        torch.testing.assert_close(locations, plain.locations, rtol=0, atol=1e-6)
        half, _ = make_fused_inputs(case, torch.bfloat16, device, seed=3)
        assert [t.dtype for t in (half.value, half.locations, half.weights)] == [torch.bfloat16] * 3
        assert half.reference_points.dtype == torch.float32
