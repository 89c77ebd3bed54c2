"""What is recorded is what the model samples."""

import pytest
import torch

from detr.inference.sampling_stats import SamplingStats, format_sampling, sampling_tables
from detr.models.sampling import level_strides, record_sampling
from ops import ms_deform_attn

M, P = 4, 4


@pytest.mark.parametrize("variant", [{}, {"with_box_refine": True, "two_stage": True}])
def test_locations_and_weights_give_the_layers_output(variant: dict, small_detector, batch):
    torch.manual_seed(0)
    model = small_detector(**variant).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    images = batch().images
    outputs, values = {}, {}

    def keep(table: dict, name: str):
        return lambda module, args, output: table.__setitem__(name, output)

    cross = model.encoder.layers[0].self_attn
    cross.output_proj.register_forward_pre_hook(lambda module, args: outputs.__setitem__("encoder", args[0]))
    cross.value_proj.register_forward_hook(keep(values, "encoder"))
    with torch.no_grad():
        expected = model(images)
        with record_sampling(model) as layers:
            found = model(images)
    assert torch.equal(found.pred_boxes, expected.pred_boxes)
    assert [layer.name for layer in layers] == ["encoder.layers.0", "decoder.layers.0", "decoder.layers.1"]
    encoder = layers[0]
    assert torch.allclose(encoder.weights.sum((-1, -2)), torch.ones(1), atol=1e-5)
    value = values["encoder"].masked_fill(~encoder.is_query[..., None], 0)
    again = ms_deform_attn(value.unflatten(-1, (M, -1)), encoder.spatial_shapes, encoder.locations, encoder.weights)
    assert torch.allclose(again, outputs["encoder"], atol=1e-5)
    # nothing is recorded afterwards
    with torch.no_grad():
        model(images)
    assert len(layers) == 3


def test_a_fresh_model_looks_one_to_four_cells_away(small_detector, batch):
    model = small_detector().eval()
    stats = SamplingStats()
    with torch.no_grad(), record_sampling(model) as layers:
        model(batch().images)
    stats.add(layers)
    strides = level_strides(model)
    # images are 96 pixels high; the sizes of levels are rounded up
    assert [-(-96 // stride) for stride in strides] == [H for H, _ in layers[0].spatial_shapes]
    rows = stats.rows(strides)
    # three layers, four levels, four heads and all together
    assert len(rows) == 3 * 4 * 5
    for row in rows:
        # offsets start at 1, 2, 3 and 4 cells along x or y or both, and nothing depends on the image yet
        assert row["percentiles_px"]["100"] == pytest.approx(4.125, abs=0.13)
        assert row["percentiles_px"]["50"] == pytest.approx(2.125, abs=0.13)
        assert row["within_1_px"] <= 0.25
        assert row["within_8_px"] == 1
        assert row["weight_within_8_px"] == pytest.approx(1)
    num_queries = int(layers[0].is_query.sum())
    assert rows[0]["num_samples"] == num_queries * M * P
    assert rows[1]["num_samples"] == num_queries * P
    stats.add(layers)
    assert stats.rows(strides)[0]["num_samples"] == 2 * num_queries * M * P
    assert len(format_sampling(rows).splitlines()) == 1 + 3 * 4
    tables = sampling_tables(rows)
    assert f"| encoder.layers.0 | 1 | {strides[1]} | 2.12 |" in tables
    assert rows[5]["percentiles_image_px"]["50"] == strides[1] * rows[5]["percentiles_px"]["50"]
    assert len([line for line in tables.splitlines() if line.startswith("| encoder.layers.0 | 3 |")]) == 2
    with pytest.raises(ValueError, match="no samples"):
        SamplingStats().rows((8, 16))
