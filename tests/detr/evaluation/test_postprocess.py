"""Top-k over (query, class) pairs, in pixels of the original image."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from detr.evaluation import PostProcess, top_detections
from detr.structures import DetectorOutput


def make_output(logits: Tensor, boxes: Tensor) -> DetectorOutput:
    return DetectorOutput(layer_logits=logits[None], layer_boxes=boxes[None])


def test_pairs_are_ranked_over_queries_and_classes_together():
    logits = torch.tensor([[[0.0, 3.0, -9.0], [2.0, -9.0, 1.0]]])
    boxes = torch.tensor([[[0.5, 0.5, 1.0, 0.5], [0.25, 0.5, 0.1, 0.2]]])
    (found,) = PostProcess(max_detections=3)(make_output(logits, boxes), torch.tensor([[100, 200]]))
    assert found.labels.tolist() == [1, 0, 2]
    torch.testing.assert_close(found.scores, torch.tensor([3.0, 2.0, 1.0]).sigmoid())
    # (h, w) = (100, 200): x is scaled by 200 and y by 100; one query gives two detections
    expected = torch.tensor([[0.0, 25.0, 200.0, 75.0], [40.0, 40.0, 60.0, 60.0], [40.0, 40.0, 60.0, 60.0]])
    torch.testing.assert_close(found.boxes, expected)


def test_boxes_beyond_the_image_are_kept_as_they_are():
    logits, boxes = torch.full((1, 1, 1), -20.0), torch.tensor([[[0.0, 1.0, 0.5, 0.5]]])
    (found,) = PostProcess()(make_output(logits, boxes), torch.tensor([[10, 10]]))
    torch.testing.assert_close(found.boxes, torch.tensor([[-2.5, 7.5, 2.5, 12.5]]))


def test_fewer_pairs_than_asked_for_gives_all_of_them():
    logits, boxes = torch.randn(2, 3, 4), torch.rand(2, 3, 4)
    found = PostProcess(max_detections=100)(make_output(logits, boxes), torch.tensor([[10, 10], [20, 30]]))
    assert [len(detections.scores) for detections in found] == [12, 12]
    assert all((detections.scores.diff() <= 0).all() for detections in found)


def test_bfloat16_outputs_are_scored_in_float32():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 50, 7, generator=generator).bfloat16()
    boxes = torch.rand(1, 50, 4, generator=generator).bfloat16()
    sizes = torch.tensor([[480, 640]])
    (found,) = PostProcess()(make_output(logits, boxes), sizes)
    (reference,) = PostProcess()(make_output(logits.float(), boxes.float()), sizes)
    assert found.scores.dtype == found.boxes.dtype == torch.float32
    assert torch.equal(found.scores, reference.scores)
    assert torch.equal(found.boxes, reference.boxes)


def test_the_last_layer_is_the_answer():
    logits = torch.stack([torch.full((1, 2, 1), 5.0), torch.full((1, 2, 1), -5.0)])
    output = DetectorOutput(layer_logits=logits, layer_boxes=torch.rand(2, 1, 2, 4))
    (found,) = PostProcess()(output, torch.tensor([[10, 10]]))
    torch.testing.assert_close(found.scores, torch.full((2,), -5.0).sigmoid())


def test_sizes_of_another_batch_are_refused():
    output = make_output(torch.randn(2, 3, 4), torch.rand(2, 3, 4))
    with pytest.raises(ValueError, match=r"orig_sizes must be \(2, 2\)"):
        PostProcess()(output, torch.tensor([[10, 10]]))
    with pytest.raises(ValueError, match="max_detections"):
        PostProcess(max_detections=0)


def test_runs_on_the_meta_device():
    scores, labels, boxes = top_detections(
        torch.empty(2, 300, 91, device="meta"),
        torch.empty(2, 300, 4, device="meta"),
        torch.empty(2, 2, device="meta"),
        max_detections=100,
    )
    assert (scores.shape, labels.shape, boxes.shape) == ((2, 100), (2, 100), (2, 100, 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_reads_the_device_once_a_batch():
    output = make_output(torch.randn(4, 300, 91, device="cuda"), torch.rand(4, 300, 4, device="cuda"))
    sizes = torch.tensor([[480, 640]] * 4)
    torch.cuda.set_sync_debug_mode("error")
    try:
        # everything up to the copy runs without waiting
        top_detections(
            output.pred_logits,
            output.pred_boxes,
            sizes.to("cuda", non_blocking=True),
            max_detections=100,
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("variant", ["plain", "refine", "two_stage"])
def test_matches_the_original(shared_dir: Path, variant: str):
    tensors = load_file(shared_dir / "golden" / f"{variant}.safetensors")
    output = make_output(tensors["out/pred_logits"], tensors["out/pred_boxes"])
    found = PostProcess(max_detections=100)(output, torch.tensor([[96, 128], [80, 104]]))
    for index, detections in enumerate(found):
        assert torch.equal(detections.labels, tensors[f"post/{index}/labels"])
        torch.testing.assert_close(detections.scores, tensors[f"post/{index}/scores"], rtol=1e-6, atol=0)
        torch.testing.assert_close(detections.boxes, tensors[f"post/{index}/boxes"], rtol=1e-6, atol=1e-4)
