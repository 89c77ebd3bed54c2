"""How weights start and where dropout acts (recipe, sections 6.1 to 6.7): what a parity run cannot do without."""

import math

import pytest
import torch
from torch import nn

from detr.models.decoder import DecoderLayer
from detr.models.encoder import EncoderLayer
from detr.models.feed_forward import FeedForward
from detr.models.levels import LevelGeometry
from ops import MSDeformAttn


def assert_xavier(weight: torch.Tensor) -> None:
    """Uniform within Xavier's bound, and fills it: PyTorch's own initialisation of a linear layer does not."""
    fan_out, fan_in = weight.shape[0] * weight[0, 0].numel(), weight[0].numel()
    bound = math.sqrt(6 / (fan_in + fan_out))
    assert weight.abs().max() <= bound
    assert weight.abs().max() > 0.9 * bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)


@pytest.fixture(scope="module")
def refine(small_detector):
    torch.manual_seed(0)
    return small_detector(with_box_refine=True, num_encoder_layers=2, num_queries=40)


@pytest.fixture(scope="module")
def two_stage(small_detector):
    torch.manual_seed(0)
    return small_detector(with_box_refine=True, two_stage=True)


def test_neck(refine):
    for projection in refine.neck.input_proj:
        assert_xavier(projection[0].weight)
        assert (projection[0].bias == 0).all()


def test_transformer_weights_are_xavier(refine):
    for layer in refine.encoder.layers:
        weights = [layer.ffn.linear1.weight, layer.ffn.linear2.weight]
        weights += [layer.self_attn.value_proj.weight, layer.self_attn.output_proj.weight]
        for weight in weights:
            assert_xavier(weight)
    for layer in refine.decoder.layers:
        weights = [layer.ffn.linear1.weight, layer.ffn.linear2.weight, layer.cross_attn.value_proj.weight]
        weights += [layer.self_attn.in_proj_weight, layer.self_attn.out_proj.weight]
        for weight in weights:
            assert_xavier(weight)


def test_attention_starts_uniform_and_looks_around(refine):
    for layer in (*refine.encoder.layers, *refine.decoder.layers):
        attention = layer.self_attn if isinstance(layer, EncoderLayer) else layer.cross_attn
        assert (attention.sampling_offsets.weight == 0).all()
        assert attention.sampling_offsets.bias.abs().max() == attention.num_points
        assert (attention.attention_weights.weight == 0).all()
        assert (attention.attention_weights.bias == 0).all()
        assert (attention.value_proj.bias == 0).all()
        assert (attention.output_proj.bias == 0).all()


def test_layers_of_a_stack_differ_in_weights_and_share_biases(refine):
    for stack in (refine.encoder.layers, refine.decoder.layers):
        assert not torch.equal(stack[0].ffn.linear1.weight, stack[1].ffn.linear1.weight)
        # deepcopied before the weights were drawn again, as in the original
        assert torch.equal(stack[0].ffn.linear1.bias, stack[1].ffn.linear1.bias)
        assert stack[0].ffn.linear1.bias.abs().max() > 0


def test_queries_and_levels(refine):
    assert refine.queries.query_embed.weight.std().item() == pytest.approx(1, rel=0.1)
    assert_xavier(refine.queries.reference_points.weight)
    assert (refine.queries.reference_points.bias == 0).all()
    assert refine.level_embed.std().item() == pytest.approx(1, rel=0.3)


def test_the_first_half_of_a_query_embedding_is_its_position(refine):
    initial = refine.queries(2)
    embedding = refine.queries.query_embed.weight
    assert torch.equal(initial.query_pos[1], embedding[:, :32])
    assert torch.equal(initial.queries[1], embedding[:, 32:])


def test_proposal_projections(two_stage):
    assert_xavier(two_stage.queries.enc_output.weight)
    assert_xavier(two_stage.queries.pos_trans.weight)


def test_box_heads(refine, two_stage, small_detector):
    plain = small_detector()
    assert len(plain.heads.bbox_embed) == 1
    assert len(refine.heads.bbox_embed) == 2
    assert len(two_stage.heads.bbox_embed) == 3
    for model in (plain, refine, two_stage):
        for head in model.heads.bbox_embed:
            assert (head.layers[-1].weight == 0).all()
            assert (head.layers[-1].bias[:2] == 0).all()
    # only the first head starts with small boxes, and none where proposals bring their size
    assert [head.layers[-1].bias[2:].tolist() for head in refine.heads.bbox_embed] == [[-2, -2], [0, 0]]
    assert all((head.layers[-1].bias[2:] == 0).all() for head in two_stage.heads.bbox_embed)
    assert plain.heads.bbox_embed[0].layers[-1].bias[2:].tolist() == [-2, -2]


def test_class_heads(two_stage):
    first, *others = two_stage.heads.class_embed
    for head in (first, *others):
        torch.testing.assert_close(head.bias, torch.full((5,), -math.log(99)))
        # equal at the start, as clones are, with PyTorch's own weights
        assert torch.equal(head.weight, first.weight)
    assert first.weight.abs().max() <= 1 / math.sqrt(32)


def make_levels() -> tuple[LevelGeometry, int]:
    maps = [torch.zeros(1, 32, 4, 6), torch.zeros(1, 32, 2, 3)]
    return LevelGeometry.from_padding_mask(torch.zeros(1, 32, 48, dtype=torch.bool), maps), 4 * 6 + 2 * 3


class TestDropout:
    """With everything dropped, only the residual path and the norms are left."""

    def test_encoder_layer(self):
        levels, tokens = make_levels()
        layer = EncoderLayer(MSDeformAttn(32, 2, 4, 2), d_model=32, dim_feedforward=48, dropout=1.0).train()
        memory, position = torch.randn(1, tokens, 32), torch.randn(1, tokens, 32)
        output = layer(memory, position, levels.encoder_reference_points(), levels)
        torch.testing.assert_close(output, layer.ffn.norm(layer.self_attn_norm(memory)))

    def test_decoder_layer(self):
        levels, tokens = make_levels()
        layer = DecoderLayer(
            MSDeformAttn(32, 2, 4, 2), d_model=32, num_heads=4, dim_feedforward=48, dropout=1.0
        ).train()
        queries, query_pos, value = (torch.randn(1, count, 32) for count in (5, 5, tokens))
        output = layer(queries, query_pos, torch.rand(1, 5, 2, 2), value, levels)
        expected = layer.ffn.norm(layer.cross_attn_norm(layer.self_attn_norm(queries)))
        torch.testing.assert_close(output, expected)
        # also on the attention probabilities of the queries among themselves
        assert layer.self_attn.dropout == 1.0

    def test_feed_forward(self):
        ffn = FeedForward(32, 48, 0.0)
        x = torch.randn(3, 7, 32)
        inner = ffn.linear1(x).clamp(min=0)
        torch.testing.assert_close(ffn(x), ffn.norm(x + ffn.linear2(inner)))
        ffn.inner_dropout.p = 1.0
        torch.testing.assert_close(ffn.train()(x), ffn.norm(x + ffn.linear2.bias))

    def test_none_in_evaluation(self):
        levels, tokens = make_levels()
        layer = EncoderLayer(MSDeformAttn(32, 2, 4, 2), d_model=32, dim_feedforward=48, dropout=0.5).eval()
        inputs = (torch.randn(1, tokens, 32), torch.randn(1, tokens, 32), levels.encoder_reference_points(), levels)
        torch.testing.assert_close(layer(*inputs), layer(*inputs), rtol=0, atol=0)

    def test_deformable_attention_has_none_of_its_own(self):
        assert not [module for module in MSDeformAttn(32, 2, 4, 2).modules() if isinstance(module, nn.Dropout)]
