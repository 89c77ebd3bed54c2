import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from detr.engine.checkpoint import Checkpoint, save_checkpoint
from detr.engine.weights import init_from, load_weights
from detr.structures import ClassTable


def write_checkpoint(path: Path, model: torch.nn.Module, names: tuple[str, ...]) -> None:
    table = ClassTable(names, tuple(range(1, len(names) + 1)))
    save_checkpoint(Checkpoint(1, 1, model.state_dict(), {}, {}, {}, None, [], table, {}, {}, {}, {}), path)


def test_weights_are_copied(detector: Callable[..., Any]):
    source, target = detector(seed=1), detector(seed=2)
    assert not torch.equal(source.level_embed, target.level_embed)
    assert load_weights(target, source.state_dict(), reset_head="auto", source="x") == []
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name


@pytest.mark.parametrize(("old", "new"), [(1, 2), (5, 3)])
def test_other_classes_reset_the_head_and_list_it(detector: Callable[..., Any], old: int, new: int):
    source, target = detector(num_classes=old, seed=1), detector(num_classes=new, seed=2)
    before = target.heads.class_embed[0].weight.clone()
    reset = load_weights(target, source.state_dict(), reset_head="auto", source="x")
    assert len(reset) == 4
    assert f"heads.class_embed.0.bias: ({old},) -> ({new},)" in reset
    # a bias of one class would broadcast to two
    assert torch.equal(target.heads.class_embed[0].weight, before)
    assert torch.equal(target.level_embed, source.level_embed)


def test_reset_head_false_refuses_other_classes(detector: Callable[..., Any]):
    target = detector(num_classes=2, seed=2)
    before = target.level_embed.clone()
    with pytest.raises(ValueError, match=r"(?s)x does not fit.*class_embed\.0\.weight.*reset_head=auto"):
        load_weights(target, detector(num_classes=5).state_dict(), reset_head=False, source="x")
    assert torch.equal(target.level_embed, before)
    with pytest.raises(ValueError, match="reset_head must be auto or false; got True"):
        load_weights(target, {}, reset_head=True, source="x")


def test_another_model_is_refused_with_a_list(detector: Callable[..., Any]):
    weights = detector().state_dict()
    weights["surplus"] = weights.pop("level_embed")
    weights["heads.bbox_embed.0.layers.2.bias"] = torch.zeros(5)
    with pytest.raises(ValueError, match="3 of") as error:
        load_weights(detector(), weights, reset_head="auto", source="x")
    for line in (
        "level_embed: missing in the weights",
        "surplus: not in this model",
        "heads.bbox_embed.0.layers.2.bias: (5,) in the weights, (4,) in this model",
        "the model and backbone that the weights were trained with",
    ):
        assert line in str(error.value)


def test_init_from_says_what_it_took(detector: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture):
    write_checkpoint(tmp_path / "last.pt", detector(num_classes=2, seed=1), ("cat", "dog"))
    with caplog.at_level(logging.INFO):
        init_from(detector(seed=2), tmp_path / "last.pt", ClassTable(tuple("abc"), (1, 2, 3)), reset_head="auto")
    assert "4 of the class head start anew" in caplog.text
    caplog.clear()
    init_from(detector(num_classes=2), tmp_path / "last.pt", ClassTable(("a", "b"), (1, 2)), reset_head=False)
    assert "trained for other classes (cat, dog" in caplog.text


@pytest.mark.parametrize(
    "names", [("dog", "emu"), ("emu", "cat", "dog", ""), ("cat", "dog", "emu"), ("gnu", "yak", "elk")]
)
def test_class_rows_follow_their_names(
    detector: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, names: tuple[str, ...]
):
    """A checkpoint of COCO fine-tuned on a few of its classes must not take person for motorcycle."""
    old_names = ("cat", "dog", "")
    source = detector(num_classes=3, seed=1)
    write_checkpoint(tmp_path / "last.pt", source, old_names)
    target = detector(num_classes=len(names), seed=2)
    initial = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with caplog.at_level(logging.INFO):
        init_from(target, tmp_path / "last.pt", ClassTable(names, tuple(range(len(names)))), reset_head="auto")
    old, new = source.state_dict(), target.state_dict()
    heads = [name for name in new if name.startswith("heads.class_embed.")]
    assert heads
    for name in heads:
        for row, class_name in enumerate(names):
            known = class_name in ("cat", "dog")
            expected = old[name][old_names.index(class_name)] if known else initial[name][row]
            assert torch.equal(new[name][row], expected), (name, class_name)
    assert torch.equal(new["level_embed"], old["level_embed"])
    num_known = len({"cat", "dog"} & set(names))
    assert f"by class name: {num_known} taken over" in caplog.text
    assert f"start anew: {len(names) - num_known} (" in caplog.text


@pytest.mark.parametrize(("score", "is_kept"), [("binary", True), ("max_class", False)])
def test_the_row_that_means_an_object_stays_in_a_two_stage_model(
    detector: Callable[..., Any], tmp_path: Path, score: str, is_kept: bool
):
    source, target = (detector(num_classes=2, seed=seed, two_stage=True, proposal_score=score) for seed in (1, 2))
    initial = target.heads.class_embed[-1].weight.clone()
    write_checkpoint(tmp_path / "last.pt", source, ("cat", "dog"))
    init_from(target, tmp_path / "last.pt", ClassTable(("emu", "cat"), (1, 2)), reset_head="auto")
    # a class that is new starts anew in every head, but for channel 0 of the proposals' head if that is no class
    proposals, layer = target.heads.class_embed[-1].weight, target.heads.class_embed[0].weight
    assert torch.equal(proposals[0], source.heads.class_embed[-1].weight[0] if is_kept else initial[0])
    assert torch.equal(proposals[1], source.heads.class_embed[-1].weight[0])
    assert not torch.equal(layer[0], source.heads.class_embed[0].weight[0])


@pytest.mark.parametrize("num_classes", [2, 5])
def test_another_number_of_queries_is_named_with_the_key(small_detector: Callable[..., Any], num_classes: int):
    """Also beside a class head of another size, which reset_head=auto takes care of."""
    weights = small_detector(num_queries=7, num_classes=5).state_dict()
    target = small_detector(num_queries=4, num_classes=num_classes)
    with pytest.raises(ValueError, match=r"Set model.num_queries=7, as the weights have"):
        load_weights(target, weights, reset_head="auto", source="x")
    other = small_detector(num_queries=7, num_classes=num_classes)
    load_weights(other, weights, reset_head="auto", source="x")
