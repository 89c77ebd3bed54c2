import pytest
import torch

from detr.engine.precision import Precision

CPU = torch.device("cpu")


def test_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match="fp32, tf32, bf16, fp16; got 'fp64'"):
        Precision("fp64")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tf32", "fp16"])
def test_a_device_that_cannot_is_refused(name: str):
    with pytest.raises(ValueError, match=f"precision={name} needs a CUDA device; got device=cpu"):
        Precision(name).prepare(CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_decides_the_dtype_of_matmuls(name: str, expected: torch.dtype):
    precision = Precision(name)  # type: ignore[arg-type]
    precision.prepare(CPU)
    with precision.autocast(CPU):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == expected


def test_fp32_forbids_tf32_convolutions():
    # PyTorch allows them by default
    torch.backends.cudnn.allow_tf32 = True
    Precision("fp32").prepare(CPU)
    assert not torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"


def test_only_fp16_scales_the_loss():
    assert not Precision("bf16").make_scaler(CPU).is_enabled()
    assert Precision("fp16").make_scaler(CPU).is_enabled()
