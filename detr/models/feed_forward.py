"""The feed-forward half of a transformer layer."""

from torch import Tensor, nn

from ops import relu_dropout


class FeedForward(nn.Module):
    """x -> norm(x + dropout(linear2(dropout(relu(linear1(x)))))), post-norm (recipe, section 6.2)."""

    def __init__(self, d_model: int, dim_feedforward: int, dropout: float) -> None:
        super().__init__()
        self.linear1 = nn.Linear(d_model, dim_feedforward)
        self.linear2 = nn.Linear(dim_feedforward, d_model)
        self.inner_dropout = nn.Dropout(dropout)
        self.outer_dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        """(N, S, C) -> (N, S, C)."""
        inner = self.inner_dropout
        update = self.linear2(relu_dropout(self.linear1(x), inner.p, training=inner.training))
        return self.norm(x + self.outer_dropout(update))
