"""Captured passes: the same numbers as plain ones, for every size, and clear errors where they cannot be."""

import gc

import pytest
import torch
from torch import nn

from detr.benchmark.steps.data import synthetic_batches
from detr.distributed import DistributedContext
from detr.engine.as_if_not_run import as_if_not_run
from detr.engine.checkpoint import Checkpoint
from detr.engine.checkpoint_writer import CheckpointWriter
from detr.engine.cuda_graphs import GraphedDetector, _from_tensors, _to_tensors
from detr.engine.optim import build_adamw
from detr.engine.precision import Precision
from detr.engine.run_folder import RunFolder
from detr.engine.schedule import StepDecay
from detr.engine.settings import TrainerSettings
from detr.engine.state import build_train_state
from detr.engine.step import train_step
from detr.losses import HungarianMatcher, SetCriterion
from detr.models import Backbone, deformable_detr
from detr.structures import ClassTable, DetectorOutput, LayerOutput
from ops import KernelConfig


@pytest.mark.parametrize("two_stage", [False, True])
def test_outputs_survive_as_tensors(two_stage):
    proposals = LayerOutput(torch.rand(2, 9, 5), torch.rand(2, 9, 4)) if two_stage else None
    output = DetectorOutput(torch.rand(3, 2, 7, 5), torch.rand(3, 2, 7, 4), proposals)
    again = _from_tensors(_to_tensors(output))
    assert again.layer_logits is output.layer_logits
    assert again.layer_boxes is output.layer_boxes
    assert again.enc_outputs == proposals


def test_a_cpu_is_refused_with_the_switch_to_set():
    with pytest.raises(ValueError, match=r"trainer.cuda_graphs=true needs a CUDA device; got cpu"):
        GraphedDetector(nn.Linear(2, 2))


def test_several_passes_a_step_are_refused():
    with pytest.raises(ValueError, match="accumulate=2"):
        TrainerSettings(cuda_graphs=True, accumulate=2)
    with pytest.raises(ValueError, match="retry_oom"):
        TrainerSettings(cuda_graphs=True, retry_oom=True)


def test_warming_up_leaves_no_trace():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with as_if_not_run(model, torch.device("cpu")):
        model(torch.rand(8, 3) + 5)
        assert not torch.equal(model[0].running_mean, before["0.running_mean"])
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert torch.equal(torch.rand(4), expected)


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make_state(
    *,
    cuda_graphs,
    precision="fp32",
    two_stage=False,
    dropout=0.0,
    compile=False,
    max_graphs=32,
    lr=1e-4,
    freeze_norm=True,
    world_size=1,
):
    torch.manual_seed(0)
    model = deformable_detr(
        Backbone("resnet18", freeze_norm=freeze_norm),
        num_classes=5,
        num_queries=30,
        d_model=64,
        num_heads=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dim_feedforward=64,
        dropout=dropout,
        with_box_refine=True,
        two_stage=two_stage,
        # sums in a fixed order, so that two runs can be compared
        kernel=KernelConfig(backend="cuda", deterministic=True),
    )
    state = build_train_state(
        model,
        SetCriterion(num_classes=5, matcher=HungarianMatcher()),
        lambda model, total_batch: build_adamw(model, total_batch=total_batch, lr=lr, scale_lr=False),
        StepDecay(epochs=1, milestones=()),
        Precision(precision),
        DistributedContext(rank=0, local_rank=0, world_size=world_size, device=torch.device("cuda", 0)),
        total_batch=4,
        steps_per_epoch=100,
        ema_decay=0.9,
        compile=compile,
        cuda_graphs=cuda_graphs,
    )
    if state.graphs is not None:
        state.graphs.max_graphs = max_graphs
    return state


def make_checkpoint(state, *, padding):
    """`padding` makes it take a while to be copied and written."""
    return Checkpoint(
        epoch=0,
        global_step=0,
        model=state.detector.state_dict() | {"padding": padding},
        optimizer=state.optimizer.state_dict(),
        schedule=state.schedule.state_dict(),
        scaler=state.scaler.state_dict(),
        ema=None,
        random_states=[],
        class_table=ClassTable(("a",), (1,)),
        preprocessing={},
        config={},
        metrics={},
        best={},
    )


def flat_gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def make_batches():
    sizes = [(192, 256), (160, 224), (192, 256), (160, 224)]
    return [
        synthetic_batches(batch_size=2, height=h, width=w, targets_per_image=3, num_classes=5, num_batches=1)[0]
        for h, w in sizes
    ]


class TestOnTheGPU:
    pytestmark = gpu

    @pytest.mark.parametrize("two_stage", [False, True], ids=["one-stage", "two-stage"])
    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    def test_losses_and_gradients_equal_plain_ones(self, precision, two_stage):
        # a rate of next to nothing keeps the weights, so that every batch is seen by the same model
        plain = make_state(cuda_graphs=False, precision=precision, two_stage=two_stage, lr=1e-12)
        graphed = make_state(cuda_graphs=True, precision=precision, two_stage=two_stage, lr=1e-12)
        tolerance = 1e-4 if precision == "fp32" else 2e-2
        num_finite = 0
        for batch in make_batches() * 4:
            expected, result = train_step(plain, [batch]), train_step(graphed, [batch])
            torch.testing.assert_close(result.loss, expected.loss, rtol=tolerance, atol=0)
            # fp16 skips steps until the loss is scaled well; at the edge of its range rounding decides
            assert precision == "fp16" or not (result.skipped or expected.skipped)
            if not (result.skipped or expected.skipped):
                num_finite += 1
                mine, reference = (flat_gradient(state.detector) for state in (graphed, plain))
                assert (mine - reference).norm() <= tolerance * reference.norm()
        assert graphed.graphs.num_graphs == 2
        assert num_finite >= 12

    def test_training_ends_where_plain_training_ends(self):
        states = [make_state(cuda_graphs=cuda_graphs) for cuda_graphs in (False, True)]
        for batch in make_batches() * 2:
            for state in states:
                train_step(state, [batch])
        for trained in ("detector", "evaluated"):
            plain, graphed = (getattr(state, trained).parameters() for state in states)
            for reference, mine in zip(plain, graphed, strict=True):
                torch.testing.assert_close(mine, reference, rtol=0, atol=5e-5)

    def test_dropout_draws_anew(self):
        state = make_state(cuda_graphs=True, dropout=0.5)
        batch = make_batches()[0].to("cuda")
        outputs = [state.model(batch.images).layer_logits.detach().clone() for _ in range(3)]
        assert not torch.equal(outputs[0], outputs[1])
        assert not torch.equal(outputs[1], outputs[2])
        torch.manual_seed(5)
        first = state.model(batch.images).layer_logits.detach().clone()
        torch.manual_seed(5)
        assert torch.equal(state.model(batch.images).layer_logits, first)

    def test_a_capture_changes_neither_batch_statistics_nor_random_numbers(self):
        states = [make_state(cuda_graphs=cuda_graphs, freeze_norm=False) for cuda_graphs in (False, True)]
        drawn = []
        for state in states:
            torch.manual_seed(5)
            train_step(state, make_batches()[:1])
            drawn.append(torch.rand(4, device="cuda"))
        plain, graphed = (dict(state.detector.named_buffers()) for state in states)
        for name, buffer in plain.items():
            torch.testing.assert_close(graphed[name], buffer, rtol=1e-4, atol=1e-5, msg=name)
        assert torch.equal(*drawn)

    def test_evaluation_runs_plain(self):
        state = make_state(cuda_graphs=True)
        batch = make_batches()[0].to("cuda")
        with torch.no_grad():
            state.model(batch.images)
        state.model.eval()
        state.model(batch.images)
        assert state.graphs.num_graphs == 0

    def test_sizes_beyond_the_limit_run_uncaptured_and_are_named(self, caplog):
        state = make_state(cuda_graphs=True, max_graphs=1)
        for batch in make_batches():
            assert torch.isfinite(train_step(state, [batch]).loss)
        assert state.graphs.num_graphs == 1
        assert caplog.text.count("uncaptured") == 1
        assert "160" in caplog.text

    def test_captures_end_where_little_memory_is_left(self, caplog, monkeypatch):
        monkeypatch.setattr("detr.engine.cuda_graphs.LEAST_FREE", 1.1)
        state = make_state(cuda_graphs=True)
        for batch in make_batches():
            assert torch.isfinite(train_step(state, [batch]).loss)
        assert (state.graphs.num_graphs, state.graphs.max_graphs) == (1, 1)
        assert caplog.text.count("further ones run uncaptured") == 1

    def test_captured_sizes_are_given_up_for_a_step_that_does_not_fit(self, caplog):
        plain, graphed = make_state(cuda_graphs=False), make_state(cuda_graphs=True)
        batches = make_batches()
        expected = [train_step(plain, [batch]).loss for batch in batches]
        losses = [train_step(graphed, batches[:1]).loss]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held, total = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[1]
        # not enough to warm up the second size
        torch.cuda.set_per_process_memory_fraction((held + 2**23) / total)
        try:
            losses += [train_step(graphed, [batch]).loss for batch in batches[1:]]
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert "did not fit beside 1 captured sizes" in caplog.text
        assert (graphed.graphs.num_graphs, graphed.graphs.max_graphs) == (0, 0)
        torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-3, atol=0)

    def test_given_up_memory_is_free(self):
        state = make_state(cuda_graphs=True)
        before = torch.cuda.memory_reserved()
        for batch in make_batches():
            train_step(state, [batch])
        state.optimizer.zero_grad(set_to_none=True)
        held = torch.cuda.memory_reserved()
        state.graphs.give_up_half()
        assert torch.cuda.memory_reserved() < held - (held - before) / 2
        # captured anew when it comes
        train_step(state, make_batches()[:1])
        assert (state.graphs.num_graphs, state.graphs.max_graphs) == (1, 1)

    def test_sizes_captured_anew_in_a_new_pool_train_the_same(self, monkeypatch):
        plain, graphed = make_state(cuda_graphs=False), make_state(cuda_graphs=True)
        is_short = iter([False, False, True, False, False, False])
        monkeypatch.setattr(GraphedDetector, "_is_short", lambda self, device: next(is_short))
        num_graphs = []
        for height in (128, 256, 192, 256, 128, 192):
            [batch] = synthetic_batches(
                batch_size=2, height=height, width=224, targets_per_image=3, num_classes=5, num_batches=1
            )
            expected, result = train_step(plain, [batch]), train_step(graphed, [batch])
            torch.testing.assert_close(result.loss, expected.loss, rtol=1e-3, atol=0)
            num_graphs.append(graphed.graphs.num_graphs)
        assert num_graphs == [1, 2, 2, 2, 3, 3]

    @pytest.mark.parametrize("heights", [(128, 256, 384, 512), (512, 384, 256, 128)], ids=["rising", "falling"])
    def test_sizes_in_a_new_pool_hold_little_more_than_the_largest(self, heights, monkeypatch):
        def reserved_after(heights):
            state = make_state(cuda_graphs=True)
            gc.collect()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            # short once all are captured, where the pool began with another size than the largest; each comes twice,
            # so that all are captured at the end
            monkeypatch.setattr(
                GraphedDetector,
                "_is_short",
                lambda self, device: self.num_graphs == 4 and next(iter(self._passes))[2] < 512,
            )
            for height in heights * 2:
                [batch] = synthetic_batches(
                    batch_size=8, height=height, width=768, targets_per_image=3, num_classes=5, num_batches=1
                )
                train_step(state, [batch])
            assert state.graphs.num_graphs == len(heights)
            state.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            reserved = torch.cuda.memory_reserved() - before
            state.graphs.give_up_half()
            return reserved

        assert reserved_after(heights) < 1.5 * reserved_after((512,))

    def test_sizes_share_the_memory_of_one_stream_and_write_to_no_other(self):
        state = make_state(cuda_graphs=True)
        for height in (256, 192, 128):
            [batch] = synthetic_batches(
                batch_size=2, height=height, width=224, targets_per_image=3, num_classes=5, num_batches=1
            )
            train_step(state, [batch])
        segments = torch.cuda.memory_snapshot()
        in_pool = [segment for segment in segments if tuple(segment["segment_pool_id"]) == tuple(state.graphs._pool)]
        assert state.graphs.num_graphs == 3
        assert len({segment["stream"] for segment in in_pool}) == 1
        # what captures gave back, and more
        others = [torch.full((2**23,), 7.0, device="cuda") for _ in range(64)]
        train_step(state, [batch])
        assert all(bool((other == 7).all()) for other in others)

    def test_a_capture_waits_for_other_threads_to_leave_the_device(self, tmp_path):
        state = make_state(cuda_graphs=True)
        writer = CheckpointWriter(RunFolder(tmp_path, None), keep_last=1)
        captured_before = []

        def wait():
            captured_before.append(state.graphs.num_graphs)
            writer.wait()

        state.graphs.before_capture = wait
        for height in range(160, 416, 32):
            payload = make_checkpoint(state, padding=torch.zeros(2**26, device="cuda"))
            writer.save(payload, is_best=False)
            [batch] = synthetic_batches(
                batch_size=2, height=height, width=224, targets_per_image=3, num_classes=5, num_batches=1
            )
            for _ in range(2):
                assert torch.isfinite(train_step(state, [batch]).loss)
        writer.wait()
        assert captured_before == list(range(8))

    def test_compiled_regions_inside(self):
        state = make_state(cuda_graphs=True, compile=True, precision="bf16", dropout=0.1)
        batch = make_batches()[0]
        losses = [float(train_step(state, [batch]).loss) for _ in range(12)]
        assert losses[-1] < losses[0]
        torch._dynamo.reset()

    def test_several_ranks_average_after_the_pass(self):
        state = make_state(cuda_graphs=True, world_size=2)
        assert state.model is state.graphs
        assert state.averages_gradients
        assert not make_state(cuda_graphs=True).averages_gradients

    def test_several_batches_a_step_are_refused(self):
        batch = make_batches()[0]
        with pytest.raises(ValueError, match="accumulate"):
            train_step(make_state(cuda_graphs=True), [batch, batch])
