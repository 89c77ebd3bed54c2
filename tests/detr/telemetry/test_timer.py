"""Named spans."""

import time

import pytest
import torch

from detr.telemetry.timer import PhaseTimer


def test_spans_repeat_and_nest():
    timer = PhaseTimer(torch.device("cpu"))
    for _ in range(2):
        with timer.span("step"):
            with timer.span("forward"):
                time.sleep(0.01)
            time.sleep(0.005)
    durations_ms = timer.read_ms()
    assert {name: len(durations) for name, durations in durations_ms.items()} == {"step": 2, "forward": 2}
    assert all(9 <= forward <= step for forward, step in zip(*map(sorted, _columns(durations_ms)), strict=True))
    assert timer.read_ms() == {}


def _columns(durations_ms: dict[str, list[float]]) -> tuple[list[float], list[float]]:
    return durations_ms["forward"], durations_ms["step"]


def test_a_disabled_timer_measures_nothing():
    timer = PhaseTimer(torch.device("cpu"), enabled=False)
    with timer.span("step"), timer.host_span("data"):
        pass
    assert timer.read_ms() == {}


def test_an_error_passes_through():
    timer = PhaseTimer(torch.device("cpu"))
    with pytest.raises(KeyError), timer.span("step"):
        raise KeyError


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_spans_measure_the_device_without_waiting():
    device = torch.device("cuda")
    timer = PhaseTimer(device)
    matrix = torch.randn(4096, 4096, device=device)
    # the first product sets up the library
    matrix @ matrix
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        start_s = time.perf_counter()
        with timer.span("matmul"):
            for _ in range(50):
                matrix @ matrix
        host_ms = (time.perf_counter() - start_s) * 1e3
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (device_ms,) = timer.read_ms()["matmul"]
    assert device_ms > 2 * host_ms
