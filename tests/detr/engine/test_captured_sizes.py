"""Which sizes are captured when, in which pool of memory and on which stream; without a GPU."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from detr.engine.cuda_graphs import GraphedDetector, _StreamRing
from detr.structures import ImageBatch


def test_captures_take_the_same_stream_each_time(monkeypatch):
    handed_out = itertools.cycle(range(32))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: next(handed_out))
    streams = _StreamRing()
    taken = []
    for num_others in (0, 3, 40, 31, 32, 1):
        for _ in range(num_others):
            torch.cuda.Stream()
        streams.rewind()
        taken.append(torch.cuda.Stream())
    assert taken == [taken[0]] * 6


def test_streams_that_never_come_again_do_not_hang(monkeypatch):
    numbers = itertools.count()
    monkeypatch.setattr(torch.cuda, "Stream", lambda: next(numbers))
    streams = _StreamRing()
    streams.rewind()
    streams.rewind()
    assert next(numbers) == 33


class Anywhere(nn.Module):
    """Says that it is on a GPU, so that what is captured when can be seen without one."""

    def parameters(self, recurse=True):
        return iter([SimpleNamespace(device=torch.device("cuda", 0))])

    def forward(self, images):
        return images


class Recorded(GraphedDetector):
    """Captures are recorded instead of made, as (height, number of the pool), on a GPU that holds `room` of them."""

    def __init__(self, *, room, fits_warm_up=True):
        super().__init__(Anywhere())
        self.room = room
        self.fits_warm_up = fits_warm_up
        self.recorded = []
        self.pools = []

    def _capture(self, pixels, sizes):
        if self._pool not in self.pools:
            self.pools.append(self._pool)
        self.recorded.append((pixels.shape[2], self.pools.index(self._pool)))
        if not self.fits_warm_up and self._is_short(pixels.device):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return lambda pixels, sizes: (pixels, sizes)

    def _is_short(self, device):
        # each size larger than all before it in its pool takes a new place
        heights = [height for height, pool in self.recorded if pool == self.pools.index(self._pool)]
        return sum(height > max(heights[:i], default=0) for i, height in enumerate(heights)) > self.room

    def see(self, *heights):
        for height in heights:
            self(ImageBatch(torch.zeros(1, 3, height, 32, dtype=torch.uint8), torch.tensor([[height, 32]])))


def test_with_room_each_size_is_captured_once():
    graphs = Recorded(room=9)
    graphs.see(64, 32, 128, 32, 64, 48, 256, 128)
    assert graphs.recorded == [(64, 0), (32, 0), (128, 0), (48, 0), (256, 0)]


@pytest.mark.parametrize("fits_warm_up", [True, False], ids=["short after a capture", "out of memory in a capture"])
def test_where_memory_is_short_a_new_pool_begins_with_the_largest_size(fits_warm_up, caplog):
    graphs = Recorded(room=2, fits_warm_up=fits_warm_up)
    graphs.see(32, 64, 48, 128, 32)
    assert graphs.recorded == [(32, 0), (64, 0), (48, 0), (128, 0), (128, 1), (32, 1)]
    # nothing larger came since, so nothing is captured a third time
    graphs.see(64, 48, 32, 128)
    assert graphs.recorded[6:] == [(64, 1), (48, 1)]
    assert (graphs.num_graphs, graphs.max_graphs) == (4, 64)
    assert "run uncaptured" not in caplog.text


def test_a_smaller_size_that_is_one_too_many_comes_behind_the_largest():
    graphs = Recorded(room=2)
    graphs.see(32, 64)
    graphs.room = 1
    graphs.see(48)
    assert graphs.recorded[2:] == [(48, 0), (64, 1), (48, 1)]


def test_what_a_new_pool_does_not_mend_ends_the_captures(caplog):
    graphs = Recorded(room=0)
    graphs.see(64, 32, 128)
    assert graphs.recorded == [(64, 0)]
    assert caplog.text.count("further ones run uncaptured") == 1


def test_out_of_memory_that_a_new_pool_does_not_mend_is_raised():
    graphs = Recorded(room=0, fits_warm_up=False)
    with pytest.raises(torch.OutOfMemoryError):
        graphs.see(64)
    graphs.give_up_half()
    assert (graphs.num_graphs, graphs.max_graphs) == (0, 0)
