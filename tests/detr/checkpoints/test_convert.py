"""Weights of four codebases into this project and back."""

import re
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from detr.checkpoints.convert import Codebase, WeightsDoNotFit, export_state, guess_codebase, import_state
from detr.checkpoints.original import original_places
from detr.checkpoints.places import Layout

VARIANTS = {
    "plain": {},
    "refine": {"with_box_refine": True},
    "two_stage": {"with_box_refine": True, "two_stage": True},
}
CODEBASES: tuple[Codebase, ...] = ("original", "hf", "mmdet", "detrex")


@lru_cache
def make_state(small_detector: Callable, settings: frozenset) -> dict[str, Tensor]:
    with torch.device("meta"):
        state = small_detector(**dict(settings)).state_dict()
    generator = torch.Generator().manual_seed(0)
    # a backbone block is enough
    names = [name for name in state if not re.match(r"backbone\.net\.layer[34]", name)]
    return {name: torch.rand(state[name].shape, generator=generator) + 0.1 for name in names}


def random_state(small_detector: Callable, **settings: object) -> dict[str, Tensor]:
    """A state dict with values of their own in every tensor."""
    return dict(make_state(small_detector, frozenset(settings.items())))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("codebase", CODEBASES)
def test_round_trips_are_bit_for_bit(codebase: Codebase, variant: str, small_detector):
    refine = variant != "plain"
    state = random_state(small_detector, **VARIANTS[variant])
    theirs = export_state(state, codebase, with_box_refine=refine)
    assert guess_codebase(theirs) == codebase
    imported = import_state(theirs, codebase, state, with_box_refine=refine, source="FILE")
    assert_equal(imported.state, state)
    assert imported.notes == ()
    again = export_state(imported.state, codebase, with_box_refine=refine)
    assert_equal(again, theirs)


def test_the_originals_own_tensors_round_trip(golden, small_detector):
    variant, tensors = golden
    theirs = tensors.under("param/")
    sizes = {name: tensors.int(key) for name, key in (("num_classes", "num_classes"), ("num_queries", "num_queries"))}
    model = small_detector(
        **sizes,
        d_model=tensors.int("d_model"),
        num_heads=tensors.int("nhead"),
        num_encoder_layers=tensors.int("enc_layers"),
        num_decoder_layers=tensors.int("dec_layers"),
        dim_feedforward=tensors.int("dim_feedforward"),
        num_encoder_points=tensors.int("enc_n_points"),
        num_decoder_points=tensors.int("dec_n_points"),
        **VARIANTS[variant],
    )
    # the reference files have their own backbone features
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("backbone.")}
    own |= {name: torch.zeros(theirs[name.removeprefix("neck.")].shape) for name in own if name.startswith("neck.")}
    refine = variant != "plain"
    imported = import_state(theirs, "original", own, with_box_refine=refine, source="FILE")
    back = export_state(imported.state, "original", with_box_refine=refine)
    for name, tensor in theirs.items():
        assert torch.equal(back[name], tensor), name
    # what the reference files leave out are other names of the same tensors
    listed = {id(back[name]) for name in theirs}
    assert all(id(tensor) in listed for tensor in back.values())


def test_the_originals_aliases(small_detector):
    names = {variant: set() for variant in VARIANTS}
    for variant, settings in VARIANTS.items():
        state = random_state(small_detector, **settings)
        names[variant] = set(export_state(state, "original", with_box_refine=variant != "plain"))
    assert "transformer.decoder.bbox_embed.1.layers.0.bias" not in names["plain"]
    assert {"class_embed.1.bias", "bbox_embed.1.layers.2.weight"} <= names["plain"]
    assert "transformer.decoder.bbox_embed.1.layers.0.bias" in names["refine"]
    assert "transformer.decoder.class_embed.1.bias" not in names["refine"]
    assert {"transformer.decoder.class_embed.2.bias", "class_embed.2.bias"} <= names["two_stage"]


@pytest.mark.parametrize(
    ("codebase", "expected"),
    [
        (
            "mmdet",
            {
                "backbone.layer1.0.conv1.weight",
                "neck.convs.2.conv.weight",
                "neck.extra_convs.0.gn.bias",
                "level_embed",
                "query_embedding.weight",
                "reference_points_fc.bias",
                "encoder.layers.0.ffn.layers.0.0.weight",
                "decoder.layers.1.self_attn.attn.in_proj_weight",
                "decoder.layers.1.norms.2.bias",
                "bbox_head.cls_branches.1.weight",
                "bbox_head.reg_branches.1.4.bias",
            },
        ),
        (
            "detrex",
            {
                "backbone.stem.conv1.norm.running_var",
                "backbone.res3.0.shortcut.norm.weight",
                "backbone.res2.1.conv2.weight",
                "neck.extra_convs.0.conv.bias",
                "transformer.level_embeds",
                "transformer.encoder.layers.0.attentions.0.value_proj.weight",
                "transformer.decoder.layers.1.attentions.0.attn.out_proj.bias",
                "transformer.decoder.layers.1.attentions.1.sampling_offsets.bias",
                "transformer.decoder.layers.1.ffns.0.layers.1.bias",
                "query_embedding.weight",
            },
        ),
        (
            "hf",
            {
                "model.backbone.conv_encoder.model.conv1.weight",
                "model.decoder.layers.0.self_attn.q_proj.bias",
                "model.decoder.layers.0.encoder_attn.sampling_offsets.bias",
                "model.query_position_embeddings.weight",
                "model.encoder.layers.0.fc2.weight",
            },
        ),
    ],
)
def test_names(codebase: Codebase, expected: set[str], small_detector):
    theirs = export_state(random_state(small_detector), codebase, with_box_refine=False)
    assert expected - set(theirs) == set()


def test_a_neck_without_biases(small_detector):
    state = random_state(small_detector)
    theirs = export_state(state, "mmdet", with_box_refine=False)
    without = {name: tensor for name, tensor in theirs.items() if not name.endswith("conv.bias")}
    imported = import_state(without, "mmdet", state, with_box_refine=False, source="FILE")
    assert not imported.state["neck.input_proj.0.0.bias"].any()
    assert len(imported.notes) == 4
    # zeros are not written, as that config has none
    assert set(export_state(imported.state, "mmdet", with_box_refine=False)) == set(without)


def test_class_heads_that_hugging_face_ties(small_detector):
    state = random_state(small_detector, with_box_refine=True)
    theirs = export_state(state, "hf", with_box_refine=True)
    del theirs["class_embed.1.weight"], theirs["class_embed.1.bias"]
    imported = import_state(theirs, "hf", state, with_box_refine=True, source="FILE")
    assert torch.equal(imported.state["heads.class_embed.1.bias"], state["heads.class_embed.0.bias"])
    assert len(imported.notes) == 2


def refused(small_detector, codebase: Codebase, file: dict, model: dict, change: Callable | None = None) -> str:
    theirs = export_state(
        random_state(small_detector, **file), codebase, with_box_refine=bool(file.get("with_box_refine"))
    )
    if change is not None:
        change(theirs)
    own = random_state(small_detector, **model)
    with pytest.raises(WeightsDoNotFit) as caught:
        import_state(theirs, codebase, own, with_box_refine=bool(model.get("with_box_refine")), source="FILE")
    return str(caught.value)


@pytest.mark.parametrize("codebase", CODEBASES)
@pytest.mark.parametrize(
    ("file", "model", "cause"),
    [
        (VARIANTS["two_stage"], VARIANTS["refine"], "add model=two_stage"),
        (VARIANTS["refine"], VARIANTS["two_stage"], "instead of model=two_stage"),
        (VARIANTS["refine"], VARIANTS["plain"], "add model=refine"),
        (VARIANTS["plain"], VARIANTS["refine"], "use model=deformable_detr"),
        ({"num_encoder_layers": 2}, {}, "add model.num_encoder_layers=2"),
        ({"num_decoder_layers": 1}, {}, "add model.num_decoder_layers=1"),
        ({"num_queries": 9}, {}, "add model.num_queries=9"),
        ({"dim_feedforward": 64}, {}, "add model.dim_feedforward=64"),
        ({"num_classes": 4}, {}, "the file has 4 classes"),
        ({"num_decoder_points": 2}, {}, "sampling points"),
    ],
)
def test_the_wrong_model(codebase: Codebase, file: dict, model: dict, cause: str, small_detector):
    message = refused(small_detector, codebase, file, model)
    assert cause in message, message
    assert message.splitlines()[1].startswith("First: ")


def test_the_wrong_codebase_names_it(small_detector):
    state = random_state(small_detector)
    theirs = export_state(state, "hf", with_box_refine=False)
    with pytest.raises(WeightsDoNotFit, match="does not hold the names of source=mmdet"):
        import_state(theirs, "mmdet", state, with_box_refine=False, source="FILE")


def test_a_missing_a_left_over_and_a_torn_tensor(small_detector):
    def change(theirs: dict[str, Tensor]) -> None:
        del theirs["transformer.level_embed"]
        theirs["transformer.extra"] = torch.zeros(3)
        theirs["class_embed.0.bias"] = torch.zeros(5)

    message = refused(small_detector, "original", {}, {}, change)
    assert message.startswith("FILE does not fit this model: 3 mismatches")
    assert "First: level_embed: missing in the file; (4, 32) here" in message
    assert "left over, (3,)" in message
    assert "differs from class_embed.0.bias, with which it is shared" in message


def test_counters_of_norms_are_left_out(small_detector):
    state = random_state(small_detector)
    theirs = export_state(state, "mmdet", with_box_refine=False)
    theirs["backbone.bn1.num_batches_tracked"] = torch.tensor(5)
    assert_equal(import_state(theirs, "mmdet", state, with_box_refine=False, source="FILE").state, state)


def test_every_tensor_of_the_original_has_one_place(small_detector):
    state = random_state(small_detector, with_box_refine=True, two_stage=True)
    layout = Layout.of(state, with_box_refine=True)
    names = [place.names[0] for name in state for place in original_places(name, layout)]
    assert len(set(names)) == len(names)


def test_an_unknown_codebase():
    with pytest.raises(ValueError, match="use one of original, hf, mmdet, detrex"):
        export_state({}, "yolo", with_box_refine=False)  # type: ignore[arg-type]
