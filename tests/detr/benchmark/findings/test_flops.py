"""The encoder's share of the arithmetic, against values by hand; and memory against grid_sample."""

from dataclasses import replace

import pytest
import torch

from detr.benchmark.findings import flops, memory
from detr.benchmark.ops.row import OpRow
from detr.benchmark.origin import Origin
from detr.models import Backbone, deformable_detr
from ops import KernelConfig, MSDeformAttn

ORIGIN = Origin("T", "python x", "gpu  H", "2026-01-02", "p.png")


@pytest.fixture(scope="module")
def rows():
    """One encoder and one decoder layer of the paper's width behind ResNet-18, 800 x 1333."""
    with torch.device("meta"):
        model = deformable_detr(
            Backbone("resnet18"),
            num_classes=91,
            num_encoder_layers=1,
            num_decoder_layers=1,
            kernel=KernelConfig("reference"),
        )
    return {row.part: row for row in flops.detector_flops(model, height=800, width=1333)}


def test_an_encoder_layer_is_what_paper_and_pencil_say(rows):
    S = 100 * 167 + 50 * 84 + 25 * 42 + 13 * 21
    # value, output and offsets are 256 x 256, weights 256 x 128, the feed-forward part 256 x 1024 twice
    assert rows["encoder"].products == 2 * S * (3 * 256 * 256 + 256 * 128 + 2 * 256 * 1024)
    assert rows["encoder"].products == 33_497_350_144
    # 16 points a head, 32 channels: five multiply-adds each
    assert rows["encoder"].sampling == S * 8 * 16 * 32 * 10


def test_a_decoder_layer_too(rows):
    Lq, S, C = 300, 22_223, 256
    attention = 4 * Lq * C * C + 2 * Lq * Lq * C
    cross = S * C * C + Lq * (C * C + C * 128 + C * C)
    feed_forward, box_head = 2 * Lq * C * 1024, Lq * (2 * C * C + C * 4)
    given = rows["decoder"].products + rows["heads"].products
    assert given == 2 * (attention + cross + feed_forward + box_head + Lq * C * 91)
    assert rows["decoder"].sampling == Lq * 8 * 16 * 32 * 10


def test_the_neck_is_three_projections_and_a_strided_convolution(rows):
    sides = {128: 100 * 167, 256: 50 * 84, 512: 25 * 42}
    products = sum(channels * 256 * cells for channels, cells in sides.items()) + 9 * 512 * 256 * 13 * 21
    assert rows["neck"].products == 2 * products


def test_the_parts_are_the_total(rows):
    parts = [rows[part] for part in flops.PARTS]
    assert sum(row.products for row in parts) == rows["total"].products
    assert sum(row.sampling for row in parts) == rows["total"].sampling
    assert sum(row.share for row in parts) == pytest.approx(1)
    assert sum(row.products_share for row in parts) == pytest.approx(1)


def test_sampling_of_one_layer():
    attention = MSDeformAttn(16, num_levels=3, num_heads=2, num_points=5, device="meta")
    assert flops.sampling_flops(attention, 7) == 7 * 2 * 3 * 5 * 8 * 10


def test_the_report_says_whether_the_claim_holds(tmp_path):
    right = [flops.FlopRow("encoder", 490, 20, 0.49, 0.5), flops.FlopRow("total", 1000, 20, 1, 1)]
    assert "Verdict: reproduced: the encoder is 49.0% of the products, 50.0%" in flops.markdown(right, ORIGIN)
    wrong = [replace(right[0], products_share=0.3, share=0.32), right[1]]
    assert flops.verdict(wrong).startswith("different")
    flops.plot(right, tmp_path / "p.png", title="T")
    assert (tmp_path / "p.png").stat().st_size > 1000


class TestMemory:
    PLAIN = OpRow("encoder", 2, 1.5, "bf16", "grid_sample", "float32", False, "ok", None, peak_mib=1000.0)
    CUDA = replace(PLAIN, backend="cuda", verified=True, peak_mib=250.0)
    NATIVE = replace(PLAIN, backend="triton", accumulator="native", verified=True, peak_mib=100.0)

    def test_saving_is_against_the_same_workload(self):
        other = replace(self.PLAIN, batch_size=8, peak_mib=4000.0)
        assert memory.saving(self.CUDA, [other, self.PLAIN]) == 0.75
        assert memory.saving(self.PLAIN, [self.PLAIN]) is None
        assert memory.saving(replace(self.CUDA, peak_mib=None), [self.PLAIN]) is None

    def test_the_verdict_is_about_the_worst_workload(self):
        rows = [self.PLAIN, self.CUDA, self.NATIVE]
        assert memory.verdict(rows).startswith("reproduced: cuda float32 75% to 75% less, claimed 71%")
        worse = [replace(row, batch_size=8, peak_mib=(row.peak_mib or 0) * 2) for row in rows]
        worse[1] = replace(worse[1], peak_mib=900.0)
        assert memory.verdict(rows + worse).startswith("different: cuda float32 55% to 75% less")
        assert memory.verdict(rows[:2]) == "open: a row is missing"

    def test_report(self, tmp_path):
        failed = replace(self.CUDA, status="not installed (x)", peak_mib=None, verified=None)
        text = memory.markdown([self.PLAIN, self.CUDA, self.NATIVE, failed], ORIGIN)
        assert "| cuda float32 | 250.0 | 75.0% | 125.0 | passed |" in text
        assert "| cuda float32 | not installed (x) |" in text
        memory.plot([self.PLAIN, self.CUDA], tmp_path / "p.png", title="T")
        assert (tmp_path / "p.png").stat().st_size > 1000
