"""What each level of the neck is computed from (recipe section 6.1)."""

import pytest
import torch
from torch import Tensor, nn

from detr.models.neck import Neck


@pytest.fixture
def features() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, c, h, w, generator=generator) for c, h, w in ((6, 20, 28), (8, 10, 14), (12, 5, 7))]


def by_hand(projection: nn.Module, source: Tensor, *, stride: int, padding: int) -> Tensor:
    convolution, norm = projection
    x = nn.functional.conv2d(source, convolution.weight, convolution.bias, stride=stride, padding=padding)
    return nn.functional.group_norm(x, norm.num_groups, norm.weight, norm.bias)


def test_the_first_extra_level_sees_the_raw_feature_and_the_next_the_level_before(features: list[Tensor]):
    # 12 channels in the last feature and the levels alike, so that the shapes fit whatever is chained
    neck = Neck([6, 8, 12], d_model=12, num_levels=5, num_groups=3)
    levels = neck(features)
    assert [tuple(level.shape) for level in levels] == [
        (2, 12, 20, 28),
        (2, 12, 10, 14),
        (2, 12, 5, 7),
        (2, 12, 3, 4),
        (2, 12, 2, 2),
    ]
    for level, projection, feature in zip(levels[:3], neck.input_proj[:3], features, strict=True):
        torch.testing.assert_close(level, by_hand(projection, feature, stride=1, padding=0))
    first, second = neck.input_proj[3:]
    torch.testing.assert_close(levels[3], by_hand(first, features[2], stride=2, padding=1))
    torch.testing.assert_close(levels[4], by_hand(second, levels[3], stride=2, padding=1))
    assert first[0].weight.shape == second[0].weight.shape == (12, 12, 3, 3)


def test_one_level_is_the_last_feature(features: list[Tensor]):
    neck = Neck([6, 8, 12], d_model=12, num_levels=1, num_groups=3)
    [level] = neck(features)
    torch.testing.assert_close(level, by_hand(neck.input_proj[0], features[2], stride=1, padding=0))


def test_the_paper_s_neck():
    neck = Neck([512, 1024, 2048])
    assert [projection[0].in_channels for projection in neck.input_proj] == [512, 1024, 2048, 2048]
    assert [projection[0].kernel_size for projection in neck.input_proj] == [(1, 1)] * 3 + [(3, 3)]
    assert {(projection[1].num_groups, projection[1].num_channels) for projection in neck.input_proj} == {(32, 256)}


def test_no_levels_at_all():
    with pytest.raises(ValueError, match="num_levels must be at least 1; got 0"):
        Neck([8], num_levels=0)
