"""Names of the original, both ways."""

import pytest
import torch

from detr.checkpoints.original import from_original, name_from_original, name_to_original


@pytest.mark.parametrize("variant", [{}, {"with_box_refine": True}, {"with_box_refine": True, "two_stage": True}])
def test_every_tensor_of_ours_has_a_name_there_and_comes_back(variant, small_detector):
    with torch.device("meta"):
        names = list(small_detector(**variant).state_dict())
    there = [name_to_original(name) for name in names]
    assert len(set(there)) == len(names)
    assert [name_from_original(name) for name in there] == names


def test_aliases_are_dropped():
    tensor = torch.zeros(1)
    state = {
        "bbox_embed.1.layers.0.bias": tensor,
        "transformer.decoder.bbox_embed.1.layers.0.bias": tensor,
        "class_embed.0.bias": tensor,
        "class_embed.1.bias": tensor,
    }
    assert set(from_original(state, shared_heads=False)) == {
        "heads.bbox_embed.1.layers.0.bias",
        "heads.class_embed.0.bias",
        "heads.class_embed.1.bias",
    }
    assert set(from_original(state, shared_heads=True)) == {"heads.class_embed.0.bias"}


def test_unknown_names_are_refused():
    with pytest.raises(KeyError, match="is not a tensor of the original Deformable DETR"):
        from_original({"bbox_head.cls_branches.0.weight": torch.zeros(1)}, shared_heads=False)
