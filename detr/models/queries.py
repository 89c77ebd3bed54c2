"""Where decoder queries come from in a one-stage model, and the shape of that answer."""

from dataclasses import dataclass

from torch import Tensor, nn

from detr.dtypes import linear_in_float32
from detr.structures import LayerOutput


@dataclass(frozen=True)
class InitialQueries:
    """What the decoder starts from.

    Attributes:
        queries: (N, Lq, C), content.
        query_pos: (N, Lq, C), position.
        reference_points: (N, Lq, 2) points or (N, Lq, 4) boxes in [0, 1] of the valid image, float32.
        enc_outputs: The proposals they were chosen from; None in a one-stage model.
    """

    queries: Tensor
    query_pos: Tensor
    reference_points: Tensor
    enc_outputs: LayerOutput | None = None


class LearnedQueries(nn.Module):
    """`num_queries` learned embeddings, and a reference point projected from each (recipe, section 6.5)."""

    def __init__(self, num_queries: int, d_model: int) -> None:
        super().__init__()
        if num_queries < 1:
            raise ValueError(f"num_queries must be at least 1; got {num_queries}")
        self.num_queries = num_queries
        # the first half is the position, the second the content
        self.query_embed = nn.Embedding(num_queries, 2 * d_model)
        self.reference_points = nn.Linear(d_model, 2)
        nn.init.xavier_uniform_(self.reference_points.weight)
        nn.init.zeros_(self.reference_points.bias)

    def forward(self, num_images: int) -> InitialQueries:
        """The same queries for each of `num_images` images."""
        query_pos, queries = self.query_embed.weight.chunk(2, dim=-1)  # (Lq, C) each
        points = linear_in_float32(self.reference_points, query_pos).sigmoid()  # (Lq, 2)
        return InitialQueries(
            queries=queries.expand(num_images, -1, -1),
            query_pos=query_pos.expand(num_images, -1, -1),
            reference_points=points.expand(num_images, -1, -1),
        )
