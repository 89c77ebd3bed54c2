"""Running means of device scalars."""

import math

import pytest
import torch

from detr.telemetry.metrics import RunningMean


def test_mean_since_the_last_reset():
    metrics = RunningMean()
    for loss, rate in ((1.0, 0.1), (3.0, 0.3)):
        metrics.add({"loss": torch.tensor(loss, requires_grad=True), "lr": rate})
    assert metrics.read() == pytest.approx({"loss": 2.0, "lr": 0.2})
    # reading does not forget
    assert metrics.read() == pytest.approx({"loss": 2.0, "lr": 0.2})
    metrics.reset()
    assert metrics.read() == {}
    metrics.add({"loss": torch.tensor(7.0)})
    assert metrics.read() == {"loss": 7.0}


def test_window_keeps_the_last_additions():
    metrics = RunningMean(window=2)
    for value in (100.0, 1.0, 2.0):
        metrics.add({"loss": torch.tensor(value)})
    assert metrics.read() == {"loss": 1.5}
    metrics.reset()
    assert metrics.read() == {}


@pytest.mark.parametrize("window", [None, 10])
def test_names_may_come_and_go(window: int | None):
    metrics = RunningMean(window=window)
    metrics.add({"loss": torch.tensor(2.0), "skipped": torch.tensor(True)})
    metrics.add({"loss": torch.tensor(4, dtype=torch.int64)})
    metrics.add({"loss": torch.tensor([6.0], dtype=torch.float64)})
    assert metrics.read() == {"loss": 4.0, "skipped": 1.0}


def test_later_changes_of_a_tensor_do_not_matter():
    # the scalars of a step may live in buffers that the next step overwrites, as under CUDA graphs
    buffer = torch.tensor(1.0)
    for metrics in (RunningMean(), RunningMean(window=3)):
        buffer.fill_(1.0)
        metrics.add({"loss": buffer})
        buffer.fill_(5.0)
        metrics.add({"loss": buffer})
        assert metrics.read() == {"loss": 3.0}


def test_reduction_sees_tensors_and_numbers_in_one_vector():
    seen = []

    def halve(sums: torch.Tensor) -> torch.Tensor:
        seen.append(sums)
        return sums / 2

    metrics = RunningMean()
    metrics.add({"loss": torch.tensor(2.0), "images_per_s": 10.0})
    assert metrics.read(halve) == {"loss": 1.0, "images_per_s": 5.0}
    assert [sums.shape for sums in seen] == [(2,)]


def test_nan_is_not_hidden():
    metrics = RunningMean()
    metrics.add({"loss": torch.tensor(float("nan"))})
    metrics.add({"loss": torch.tensor(1.0)})
    assert math.isnan(metrics.read()["loss"])


def test_only_scalars():
    with pytest.raises(ValueError, match=r"metric loss must be a scalar; got shape \(2,\)"):
        RunningMean().add({"loss": torch.zeros(2)})
    with pytest.raises(ValueError, match="window"):
        RunningMean(window=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 4])
def test_adding_does_not_wait_for_the_device(window: int | None):
    metrics = RunningMean(window=window)
    values = {"loss": torch.ones((), device="cuda"), "loss_ce": torch.ones((), device="cuda"), "lr": 0.1}
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            metrics.add(values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert metrics.read() == pytest.approx({"loss": 1.0, "loss_ce": 1.0, "lr": 0.1})
