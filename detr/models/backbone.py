"""Any timm backbone as a feature pyramid. Normalises the pixels, since mean and std belong to the weights."""

import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from torch import Tensor, nn

from detr.models.frozen_norm import freeze_batch_norms

logger = logging.getLogger(__name__)

# what PyTorch says where a model expects another size than it gets: windows, strided sums, tables of positions
_SIZE_FAULT = re.compile(
    r"size of tensor a \(.+\) must match|is invalid for input of size|Sizes of tensors must match|"
    r"Attempting to broadcast a dimension of length|out of bounds for dimension|"
    r"[Kk]ernel size can't be greater than actual input|Output size is too small"
)


class Backbone(nn.Module):
    """A timm model with `features_only=True`; channels and strides are asked, never assumed.

    Args:
        name: timm model name.
        pretrained: False: random weights. True: timm downloads its default weights of this model. A path:
            weights of this timm model in a local .safetensors, .pth or .pt file; a classifier in it is left
            out, a missing weight is an error.
        out_indices: Which of timm's feature levels to return, fine to coarse.
        freeze: Names of child modules whose parameters do not train, e.g. [conv1, bn1, layer1].
        freeze_norm: Turn batch norms into fixed affine maps with the statistics they hold (FrozenBatchNorm2d,
            DETR's choice). Only right for pretrained weights: with random ones the statistics are not yet any.
        output_stride: Dilate the last stages so that the total stride stays at this number (DC5: 16). None
            leaves the model as it is.
        mean: RGB means of pixels in [0, 1]; None takes those the timm weights were trained with.
        std: Likewise the standard deviations.
        timm_args: Further arguments of this timm model, e.g. {strict_img_size: false} for Swin.

    Raises:
        ValueError: An unknown model name, feature level or child module, or a weight file that does not fit.
        FileNotFoundError: `pretrained` is a path without a file.
        OSError: The weights cannot be downloaded.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self,
        name: str,
        *,
        pretrained: bool | str = False,
        out_indices: Sequence[int] = (2, 3, 4),
        freeze: Sequence[str] = (),
        freeze_norm: bool = True,
        output_stride: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        timm_args: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not timm.is_model(name):
            raise ValueError(
                f"backbone.name={name!r} is not a timm model; similar names: {', '.join(_similar_names(name))}. "
                "timm.list_models() has all of them"
            )
        arguments = dict(timm_args or {})
        if output_stride is not None:
            arguments["output_stride"] = output_stride
        # timm types what it returns as a plain module
        net: Any
        try:
            net = timm.create_model(
                name,
                pretrained=pretrained is True,
                features_only=True,
                out_indices=tuple(out_indices),
                **arguments,
            )
        except (AssertionError, IndexError) as error:
            raise ValueError(_unknown_levels(name, out_indices, arguments)) from error
        except OSError as error:
            raise OSError(
                f"backbone.pretrained=true: timm cannot get the weights of {name} ({error}). Give the path of a file "
                "that you downloaded elsewhere, backbone.pretrained=FILE, or false for random weights"
            ) from error
        self.channels: tuple[int, ...] = tuple(net.feature_info.channels())
        self.strides: tuple[int, ...] = tuple(net.feature_info.reduction())
        if output_stride is None and len(set(self.strides)) < len(self.strides):
            _warn_of_equal_strides(name, net.feature_info, arguments)
        self._channels_last = str(getattr(net, "output_fmt", "NCHW")).endswith("NHWC")
        config = net.pretrained_cfg
        if isinstance(pretrained, str):
            _load_local_weights(net, Path(pretrained))
        if freeze_norm:
            net = freeze_batch_norms(net)
        _freeze_children(net, freeze)
        # channels last is what the convolutions of a GPU compute in: otherwise every one turns its input and output
        self.net = net.to(memory_format=torch.channels_last)
        pixel_mean = torch.tensor(config["mean"] if mean is None else mean).view(1, 3, 1, 1)
        pixel_std = torch.tensor(config["std"] if std is None else std).view(1, 3, 1, 1)
        # not in the state_dict: they are configuration, and checkpoints of other codebases lack them
        self.register_buffer("pixel_mean", pixel_mean, persistent=False)
        self.register_buffer("pixel_std", pixel_std, persistent=False)
        self._made_for_px: tuple[int, int] = tuple(config["input_size"][1:])

    def __call__(self, pixels: Tensor, padding_mask: Tensor) -> tuple[Tensor, ...]:
        """`forward`; here and not there, since torch.compile leaves no exception to a handler in what it compiles.

        Raises:
            ValueError: The model does not take this H and W.
        """
        try:
            features: tuple[Tensor, ...] = super().__call__(pixels, padding_mask)
        except (AssertionError, RuntimeError, IndexError) as error:
            fault = _size_fault(error)
            if fault is None:
                raise
            raise ValueError(self._refused_size(pixels, fault)) from error
        return features

    def forward(self, pixels: Tensor, padding_mask: Tensor) -> tuple[Tensor, ...]:
        """Feature maps (N, C_i, H / stride_i, W / stride_i), fine to coarse.

        Args:
            pixels: (N, 3, H, W) uint8 RGB; see :class:`detr.structures.ImageBatch`.
            padding_mask: (N, H, W) bool, True = padding.
        """
        # as the convolutions want them, and as batches from files come
        pixels = pixels.to(self.pixel_mean.dtype, memory_format=torch.channels_last) / 255
        pixels = (pixels - self.pixel_mean) / self.pixel_std
        # padding is zero after normalisation, as DETR pads normalised images; in place, which keeps the layout
        pixels.masked_fill_(padding_mask[:, None], 0)
        features = self.net(pixels)
        if self._channels_last:
            features = [feature.permute(0, 3, 1, 2) for feature in features]
        return tuple(features)

    def _refused_size(self, pixels: Tensor, fault: str) -> str:
        """What to do about a batch whose size the model does not take."""
        h, w = pixels.shape[-2:]
        made_h, made_w = self._made_for_px
        return (
            f"the backbone cannot take batches of {h} x {w} pixels (h x w): {fault.rstrip('.')}. Round them up "
            f"with data.pad_to={self.strides[-1]}, its coarsest stride, or data.pad_to={max(made_h, made_w)}, the size "
            "it was made for; a model that checks its size needs +backbone.timm_args.dynamic_img_size=true (a ViT) or "
            "+backbone.timm_args.strict_img_size=false (Swin) as well, and one that takes no other size "
            f"transforms=fixed transforms.eval.size=[{made_h},{made_w}]"
        )


def _size_fault(error: Exception) -> str | None:
    """What a model says about a size that it does not take; None: the error is about something else."""
    # torch.compile quotes the model's error in its own
    quoted = re.search(r"got (\w+)\((['\"])(.*)\2\)", str(error))
    kind, text = (type(error).__name__, str(error).split("\n")[0]) if quoted is None else (quoted[1], quoted[3])
    # timm refuses a size by an assertion, where it looks at it
    return text if kind == "AssertionError" or _SIZE_FAULT.search(text) else None


def _warn_of_equal_strides(name: str, info: Any, arguments: Mapping[str, Any]) -> None:
    """Say that the chosen levels are no pyramid, and which one to choose instead.

    Args:
        name: Of the model.
        info: timm's `feature_info` of the chosen levels.
        arguments: The model was made with.
    """
    last = _levels_of(name, arguments).out_indices[-1]
    logger.warning(
        "backbone.out_indices=%s: levels of %s share a stride (%s), and of its %d levels the last is %d. For the "
        "features of its end set backbone.out_indices=[%d]; the model makes its coarser levels from them",
        *(list(info.out_indices), name, ", ".join(map(str, info.reduction())), last + 1, last, last),
    )


def _similar_names(name: str) -> list[str]:
    """Names of timm that begin or look like a mistaken one; never none."""
    family = name.rpartition("/")[2].split("_")[0].split(".")[0]
    names = timm.list_models()
    close = timm.list_models(f"*{family}*")[:8] if family else []
    return close or difflib.get_close_matches(name.lower(), names, n=8, cutoff=0.4) or ["resnet50", "convnext_tiny"]


def _unknown_levels(name: str, out_indices: Sequence[int], arguments: Mapping[str, Any]) -> str:
    """What is wrong with feature levels that timm refuses, with those that the model has."""
    info = _levels_of(name, arguments)
    levels = ", ".join(
        f"{index} (stride {stride})" for index, stride in zip(info.out_indices, info.reduction(), strict=True)
    )
    return (
        f"backbone.out_indices={list(out_indices)} names levels that {name} does not have; it has {levels}. "
        f"Set backbone.out_indices={str(list(info.out_indices[-3:])).replace(' ', '')}"
    )


def _levels_of(name: str, arguments: Mapping[str, Any]) -> Any:
    """timm's `feature_info` of all levels of a model; only sizes are made, no weights."""
    with torch.device("meta"):
        return timm.create_model(name, features_only=True, **arguments).feature_info


def _freeze_children(net: nn.Module, names: Sequence[str]) -> None:
    children = dict(net.named_children())
    if isinstance(names, str | bool) or not isinstance(names, Sequence):
        raise ValueError(
            f"backbone.freeze is a list of parts of the backbone; got {names!r}. All of them are "
            f"'backbone.freeze=[{','.join(children)}]', none is []"
        )
    for name in names:
        if name not in children:
            raise ValueError(
                f"backbone.freeze names {name!r}, which this backbone does not have; it has: {', '.join(children)}"
            )
        children[name].requires_grad_(False)


def _load_local_weights(net: nn.Module, path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(
            f"backbone.pretrained={path} is not a file; give the path of a .safetensors, .pth or .pt file, "
            "or true to let timm download its weights, or false for random ones"
        )
    if path.suffix == ".safetensors":
        weights = safetensors.torch.load_file(path)
    else:
        weights = torch.load(path, map_location="cpu", weights_only=True)
        for wrapper in ("model", "state_dict"):
            weights = weights.get(wrapper, weights)
    # timm flattens sequential stages for feature extraction: its file says stages.0, the module stages_0
    by_module_name = {re.sub(r"^([a-z]+)\.(\d+)\.", r"\1_\2.", key): key for key in weights}
    state: dict[str, Tensor] = {}
    missing = []
    for name, own in net.state_dict().items():
        key = name if name in weights else by_module_name.get(name)
        if key is None:
            # a counter that only momentum=None batch norms read
            if not name.endswith("num_batches_tracked"):
                missing.append(name)
        elif weights[key].shape != own.shape:
            raise ValueError(
                f"{path}: {key} has shape {tuple(weights[key].shape)}, this backbone needs {tuple(own.shape)}; "
                "is the file of another model?"
            )
        else:
            state[name] = weights[key]
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} of {len(net.state_dict())} weights of this backbone, first "
            f"{', '.join(missing[:5])}; is the file of another model?"
        )
    net.load_state_dict(state, strict=False)
    logger.info("backbone weights: %d tensors from %s, %d left out", len(state), path, len(weights) - len(state))
