"""Rows of class heads by name."""

import json
from pathlib import Path

import pytest
import torch

from detr.checkpoints.classes import coco_class_table, named_rows, select_rows


def test_coco_is_what_its_annotations_say(shared_dir: Path):
    path = shared_dir / "data" / "coco-mini" / "annotations" / "instances_val2017.json"
    categories = {row["id"]: row["name"] for row in json.loads(path.read_text())["categories"]}
    table = coco_class_table(80)
    assert dict(zip(table.category_ids, table.names, strict=True)) == categories
    assert list(table.category_ids) == sorted(categories)
    by_id = coco_class_table(91)
    assert by_id.category_ids == tuple(range(91))
    assert {id: name for id, name in enumerate(by_id.names) if name} == categories
    with pytest.raises(ValueError, match="12 classes, which is not COCO"):
        coco_class_table(12)


@pytest.mark.parametrize("variant", [{}, {"with_box_refine": True}, {"with_box_refine": True, "two_stage": True}])
def test_91_rows_become_80_by_name(variant: dict, small_detector):
    table = coco_class_table(91)
    state = small_detector(num_classes=91, **variant).state_dict()
    refine = bool(variant)
    for name in state:
        if name.startswith("heads.class_embed."):
            state[name] = torch.arange(91.0).reshape(-1, *[1] * (state[name].ndim - 1)).expand(state[name].shape)
    selected = select_rows(state, named_rows(table), with_box_refine=refine, binary_proposals=True)
    expected = torch.tensor(coco_class_table(80).category_ids, dtype=torch.float32)
    heads = [name for name in state if name.startswith("heads.class_embed.") and name.endswith("bias")]
    assert len(heads) == (1 if not refine else 3 if "two_stage" in variant else 2)
    for name in heads:
        found = selected[name]
        if "two_stage" in variant and name == "heads.class_embed.2.bias":
            # channel 0 of the proposals says whether there is an object at all
            assert found[0] == 0
            assert torch.equal(found[1:], expected[1:])
        else:
            assert torch.equal(found, expected)
    assert selected.keys() == state.keys()
