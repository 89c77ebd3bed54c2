"""Backbones through timm."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from detr.models.backbone import Backbone
from detr.structures import ImageBatch


@pytest.mark.parametrize(
    ("name", "out_indices", "timm_args"),
    [
        ("resnet18", (2, 3, 4), {}),
        ("tf_efficientnet_lite0", (2, 3, 4), {}),
        ("convnext_atto", (1, 2, 3), {}),
        ("swin_tiny_patch4_window7_224", (1, 2, 3), {"strict_img_size": False}),
    ],
)
def test_features_have_the_stated_channels_and_strides(name, out_indices, timm_args):
    backbone = Backbone(name, out_indices=out_indices, freeze_norm=False, timm_args=timm_args).eval()
    images = ImageBatch.from_images([torch.randint(0, 256, (3, 64, 96), dtype=torch.uint8)])
    features = backbone(images.pixels, images.padding_mask)
    assert backbone.strides == (8, 16, 32)
    for feature, channels, stride in zip(features, backbone.channels, backbone.strides, strict=True):
        assert feature.shape == (1, channels, 64 // stride, 96 // stride)


def test_pixels_are_normalised_and_padding_is_zero():
    backbone = Backbone("resnet18", mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    seen = {}
    backbone.net.register_forward_pre_hook(lambda _, inputs: seen.update(pixels=inputs[0]))
    images = ImageBatch.from_images([torch.full((3, 64, 64), 255, dtype=torch.uint8)], pad_to=96)
    backbone(images.pixels, images.padding_mask)
    expected = torch.tensor([(1 - 0.5) / 0.2, (1 - 0.4) / 0.3, (1 - 0.3) / 0.4])
    torch.testing.assert_close(seen["pixels"][0, :, 10, 20], expected)
    assert (seen["pixels"][0, :, 64:] == 0).all()
    assert (seen["pixels"][0, :, :, 64:] == 0).all()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("resnet18", {}), ("levit_128s", {"out_indices": (0, 1, 2)})],  # levit normalises tokens, in one dimension
)
def test_frozen_norms_do_not_follow_the_data(name, arguments):
    torch.manual_seed(0)
    size = 224 if name == "levit_128s" else 64
    batch = ImageBatch.from_images([torch.randint(0, 256, (3, size, size), dtype=torch.uint8)])
    images = (batch.pixels, batch.padding_mask)
    backbone = Backbone(name, freeze_norm=True, **arguments).train()
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    backbone(*images)
    after = backbone.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    torch.testing.assert_close(backbone(*images)[-1], backbone.eval()(*images)[-1])


def test_frozen_children_do_not_train():
    backbone = Backbone("resnet18", freeze=("conv1", "layer1"))
    trainable = {name.split(".")[1] for name, p in backbone.named_parameters() if p.requires_grad}
    assert trainable == {"layer2", "layer3", "layer4"}


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("name", ["resnet18", "convnext_atto"])
def test_local_weights_round_trip(tmp_path, name, suffix):
    """A whole timm model's file, classifier and dotted stage names included, fills every feature weight."""
    import timm

    torch.manual_seed(0)
    weights = timm.create_model(name).state_dict()
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(weights, path)
    else:
        torch.save(weights, path)
    out_indices = (2, 3) if name == "resnet18" else (1, 2)
    backbone = Backbone(name, pretrained=str(path), out_indices=out_indices, freeze_norm=False)
    for key, tensor in backbone.net.state_dict().items():
        original = key if key in weights else key.replace("_", ".", 1)
        assert torch.equal(tensor, weights[original]), key


def test_reference_lite0_weights_load_whole(shared_dir):
    path = shared_dir / "weights" / "tf_efficientnet_lite0.fp16.safetensors"
    random = Backbone("tf_efficientnet_lite0", freeze_norm=True)
    loaded = Backbone("tf_efficientnet_lite0", pretrained=str(path), freeze_norm=True)
    assert loaded.pixel_mean.flatten().tolist() == [0.5, 0.5, 0.5]
    states = zip(random.state_dict().values(), loaded.state_dict().values(), strict=True)
    assert all(not torch.equal(a, b) for a, b in states)


class AddsTwoScales(nn.Module):
    """Adds a map to one of twice its stride, enlarged: right for multiples of 32 only."""

    def forward(self, pixels):
        fine, coarse = pixels[..., ::16, ::16], pixels[..., ::32, ::32]
        return [fine + nn.functional.interpolate(coarse, scale_factor=2.0)]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("test_vit", {}, "levels of test_vit share a stride (16, 16, 16), and of its 6 levels the last is 5"),
        ("test_vit", {"out_indices": (5,)}, ""),
        ("xcit_nano_12_p16_224", {}, "set backbone.out_indices=[11]"),
        ("resnet18", {}, ""),
        ("resnet18", {"output_stride": 16}, ""),  # asked for
    ],
)
def test_levels_of_one_stride_are_said(name, arguments, says, caplog):
    Backbone(name, freeze_norm=False, **arguments)
    assert [says in record.message for record in caplog.records] == ([True] if says else [])


class TestBadInput:
    def test_unknown_model(self):
        with pytest.raises(ValueError, match=r"backbone.name='resnet51' is not a timm model; similar names: "):
            Backbone("resnet51")

    @pytest.mark.parametrize("name", ["", "nosuchnet", "mnv4", "hf_hub:timm/resnet18.a1_in1k", "Swin-T"])
    def test_an_unknown_model_has_similar_names(self, name):
        with pytest.raises(ValueError, match=r"is not a timm model; similar names: \w+, .*timm.list_models"):
            Backbone(name)

    @pytest.mark.parametrize(
        ("name", "levels"),
        [("convnext_atto", "[1,2,3]"), ("efficientformer_l1", "[1,2,3]"), ("visformer_tiny", "[0,1,2]")],
    )
    def test_levels_that_the_model_lacks(self, name, levels):
        with pytest.raises(ValueError, match=r"names levels that .* does not have; it has 0 \(stride") as error:
            Backbone(name, out_indices=(2, 3, 4))
        assert str(error.value).endswith(f"Set backbone.out_indices={levels}")
        Backbone(name, out_indices=json.loads(levels))

    @pytest.mark.parametrize("freeze", [True, "layer1", 3, {"layer1": True}])
    def test_freeze_is_a_list(self, freeze):
        with pytest.raises(ValueError, match=r"freeze is a list .* \'backbone.freeze=\[conv1,bn1,act1") as error:
            Backbone("resnet18", freeze=freeze)
        assert repr(freeze) in str(error.value)

    @pytest.mark.parametrize("name", ["test_vit", "vit_tiny_patch16_224"])
    def test_a_size_that_the_model_cannot_take(self, name):
        batch = ImageBatch.from_images([torch.zeros(3, 60, 100, dtype=torch.uint8)])
        with pytest.raises(ValueError, match=r"60 x 100 pixels \(h x w\): .*data.pad_to=16, .*dynamic_img_size.*fixed"):
            Backbone(name, freeze_norm=False)(batch.pixels, batch.padding_mask)
        taught = Backbone(name, freeze_norm=False, timm_args={"dynamic_img_size": True})
        batch = ImageBatch.from_images([torch.zeros(3, 60, 100, dtype=torch.uint8)], pad_to=16)
        assert {feature.shape[2:] for feature in taught(batch.pixels, batch.padding_mask)} == {(4, 7)}

    @pytest.mark.parametrize(
        ("name", "levels", "is_accepted"),
        [
            ("coatnet_pico_rw_224", (2, 3, 4), (224, 224)),  # sums of maps that differ by a cell
            ("levit_128s", (0, 1, 2), (224, 224)),  # a table of positions
            ("gcvit_xxtiny", (1, 2, 3), (224, 224)),  # a reshape into windows
            ("mvitv2_tiny", (1, 2, 3), (224, 224)),  # an index beyond a table
            ("hrnet_w18_small", (2, 3, 4), (224, 256)),
        ],
    )
    def test_a_size_that_fails_inside_the_model(self, name, levels, is_accepted):
        backbone = Backbone(name, out_indices=levels, freeze_norm=False).eval()
        batch = ImageBatch.from_images([torch.zeros(3, 230, 250, dtype=torch.uint8)])
        with pytest.raises(ValueError, match=r"230 x 250 pixels.*data.pad_to=(32|64).*size=\[224,224\]") as error:
            backbone(batch.pixels, batch.padding_mask)
        assert isinstance(error.value.__cause__, RuntimeError | IndexError)
        batch = ImageBatch.from_images([torch.zeros(3, *is_accepted, dtype=torch.uint8)])
        assert len(backbone(batch.pixels, batch.padding_mask)) == 3

    @pytest.mark.parametrize(
        "fault",
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
            RuntimeError("CUDA error: device-side assert triggered"),
            RuntimeError("expected scalar type Float but found Half"),
            RuntimeError("Given groups=1, weight of size [8, 3, 3, 3], expected input to have 3 channels, but got 4"),
            IndexError("list index out of range"),
        ],
    )
    def test_another_fault_passes_as_it_is(self, fault):
        def fail(*_):
            raise fault

        backbone = Backbone("test_resnet", freeze_norm=False)
        backbone.net.conv1.register_forward_pre_hook(fail)
        batch = ImageBatch.from_images([torch.zeros(3, 64, 64, dtype=torch.uint8)])
        with pytest.raises(type(fault)) as error:
            backbone(batch.pixels, batch.padding_mask)
        assert error.value is fault

    @pytest.mark.parametrize(
        ("net", "words"),
        [(None, r"Input height \(72\)"), (AddsTwoScales(), "(The size of|Attempting to broadcast)")],
    )
    def test_a_compiled_backbone_refuses_a_size_alike(self, net, words):
        """Where timm looks at it, and where it fails inside; torch.compile wraps both errors."""
        backbone = Backbone("test_vit", freeze_norm=False).eval()
        backbone.net = net or backbone.net
        backbone.compile(fullgraph=True, dynamic=False, backend="eager")
        side = 160
        batch = ImageBatch.from_images([torch.zeros(3, side, side, dtype=torch.uint8)])
        assert backbone(batch.pixels, batch.padding_mask)[-1].shape[-1] == side // 16
        batch = ImageBatch.from_images([torch.zeros(3, 72, 72, dtype=torch.uint8)])
        with pytest.raises(ValueError, match=rf"72 x 72 pixels \(h x w\): {words}.*data.pad_to=16,"):
            backbone(batch.pixels, batch.padding_mask)

    def test_weights_that_cannot_be_downloaded(self, monkeypatch):
        def unreachable(*_, **__):
            raise ConnectionError("Name or service not known")

        monkeypatch.setattr("timm.create_model", unreachable)
        with pytest.raises(
            OSError, match=r"pretrained=true: .* weights of resnet18 \(Name .* backbone.pretrained=FILE"
        ):
            Backbone("resnet18", pretrained=True)

    def test_unknown_child(self):
        with pytest.raises(ValueError, match=r"'layer9', which this backbone does not have; it has: conv1, bn1"):
            Backbone("resnet18", freeze=("layer9",))

    def test_missing_file(self):
        with pytest.raises(FileNotFoundError, match=r"backbone.pretrained=/nowhere/w.pth is not a file"):
            Backbone("resnet18", pretrained="/nowhere/w.pth")

    def test_file_of_another_model(self, tmp_path):
        path = tmp_path / "other.safetensors"
        save_file({"conv1.weight": torch.zeros(64, 3, 7, 7)}, path)
        with pytest.raises(ValueError, match=r"lacks .* weights of this backbone"):
            Backbone("resnet18", pretrained=str(path))

    def test_wrong_shape(self, tmp_path):
        path = tmp_path / "other.safetensors"
        save_file({"conv1.weight": torch.zeros(1, 3, 7, 7)}, path)
        with pytest.raises(ValueError, match=r"conv1.weight has shape \(1, 3, 7, 7\), this backbone needs"):
            Backbone("resnet18", pretrained=str(path))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_convolutions_get_channels_last_from_any_batch(layout):
    backbone = Backbone("test_resnet")
    seen = {}
    backbone.net.register_forward_pre_hook(lambda _, inputs: seen.update(pixels=inputs[0]))
    images = [torch.randint(0, 256, (3, 64, width), dtype=torch.uint8) for width in (96, 64)]
    batch = ImageBatch.from_images(images)
    backbone(batch.pixels.contiguous(memory_format=layout), batch.padding_mask)
    assert seen["pixels"].is_contiguous(memory_format=torch.channels_last)
    assert not seen["pixels"][1, :, :, 64:].any()
