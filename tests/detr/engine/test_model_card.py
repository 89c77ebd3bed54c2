"""A model card says what the checkpoint holds, and nothing that it does not."""

from dataclasses import replace
from pathlib import Path

import torch

from detr.engine.checkpoint import Checkpoint
from detr.engine.model_card import model_card, write_model_card


def test_what_a_card_says(checkpoint: Checkpoint, tmp_path: Path):
    config = {
        "name": "run",
        "model": {"with_box_refine": True, "backbone": {"name": "resnet50"}},
        "data": {"root": "d"},
    }
    full = replace(checkpoint, config=config, metrics={"AP": 0.51234, "APs": -1.0, "per_class": {"cat": None}})
    write_model_card(full, tmp_path / "card.md", data_license="CC BY 4.0")
    text = (tmp_path / "card.md").read_text(encoding="utf-8")
    assert text.startswith("# run\n")
    for part in ("(refinement), backbone resnet50", "3 epochs, 12 optimizer steps", "cat (7), 犬 (90)", "root d"):
        assert part in text
    assert "| AP | 0.5123 |\n| APs | - |" in text
    assert "Licence: CC BY 4.0" in text


def test_parameters_are_counted_without_statistics(checkpoint: Checkpoint):
    weights = {
        "a.weight": torch.zeros(1000, 1000),
        "a.bias": torch.zeros(500_000),
        "a.running_mean": torch.zeros(900_000),
        "a.running_var": torch.zeros(900_000),
        "a.num_batches_tracked": torch.zeros((), dtype=torch.int64),
    }
    text = model_card(replace(checkpoint, model=weights, ema=None))
    assert "1.5 million parameters;" in text.replace("\n", " ")


def test_what_is_not_known_is_said(checkpoint: Checkpoint):
    text = model_card(replace(checkpoint, metrics={}))
    assert "Licence: unknown" in text
    assert "not yet evaluated" in text
    assert "backbone unknown" in text
