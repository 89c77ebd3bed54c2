"""The number format of the forward and backward pass.

Parameters, optimizer and loss stay in float32 whatever the name: bf16 and fp16 are autocast modes.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch.amp.grad_scaler import GradScaler

PrecisionName = Literal["fp32", "tf32", "bf16", "fp16"]

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LEAST_CAPABILITY = {"tf32": (8, 0), "bf16": (8, 0), "fp16": (7, 0)}


@dataclass(frozen=True)
class Precision:
    """Which arithmetic the model runs in.

    Args:
        name: `fp32` full precision everywhere; `tf32` float32 tensors, matmuls and convolutions rounded to
            TF32; `bf16` autocast; `fp16` autocast with a scaled loss.

    Raises:
        ValueError: The name is not one of these.
    """

    name: PrecisionName = "fp32"

    def __post_init__(self) -> None:
        if self.name not in get_args(PrecisionName):
            raise ValueError(f"precision must be one of {', '.join(get_args(PrecisionName))}; got {self.name!r}")

    def prepare(self, device: torch.device) -> None:
        """Check that `device` can do it and set the process's matmul and convolution modes.

        PyTorch lets float32 convolutions run in TF32 unless told otherwise, so fp32 has to say no.

        Raises:
            ValueError: `device` cannot run this precision.
        """
        self._require_support(device)
        use_tf32 = self.name == "tf32"
        torch.set_float32_matmul_precision("high" if use_tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = use_tf32

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        """The context of a forward pass on `device`; off for fp32 and tf32."""
        dtype = _AUTOCAST_DTYPES.get(self.name)
        # not every device type of PyTorch has autocast, and asking for a context that does nothing raises there
        return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)

    def make_scaler(self, device: torch.device) -> GradScaler:
        """The loss scaler; one that does nothing unless the name is fp16."""
        return GradScaler(device.type, enabled=self.name == "fp16")

    def _require_support(self, device: torch.device) -> None:
        if self.name == "fp32" or (self.name == "bf16" and device.type == "cpu"):
            return
        if device.type != "cuda":
            raise ValueError(
                f"precision={self.name} needs a CUDA device; got device={device.type}. Use precision=fp32"
                + (" or precision=bf16" if device.type == "cpu" else "")
            )
        capability = torch.cuda.get_device_capability(device)
        needed = _LEAST_CAPABILITY[self.name]
        if capability < needed:
            raise ValueError(
                f"precision={self.name} needs compute capability {needed[0]}.{needed[1]}; "
                f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}. Use precision=fp32"
                + (" or precision=fp16" if capability >= _LEAST_CAPABILITY["fp16"] else "")
            )
