"""Samples of one query drawn on its image."""

from PIL import Image, ImageDraw
from torch import Tensor

from detr.models.sampling import LayerSampling
from detr.visualize import label_color


def draw_sampling(image: Tensor, layer: LayerSampling, *, image_index: int, query: int) -> Image.Image:
    """Every sample of a query as a disc: its colour is the level, its area the attention weight.

    Args:
        image: (3, h, w) uint8 RGB, the original.
        layer: What was recorded.
        image_index: Of the image in its batch.
        query: The query; of an encoder layer, the feature cell.

    Raises:
        ValueError: There is no such query.
    """
    num_queries = layer.locations.shape[1]
    if not 0 <= query < num_queries:
        raise ValueError(f"{layer.name} has queries 0 to {num_queries - 1}; got {query}")
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())  # (h, w, 3)
    width_px, height_px = picture.size
    draw = ImageDraw.Draw(picture)
    ratios = layer.valid_ratios[image_index].cpu()  # (L, 2)
    locations = layer.locations[image_index, query].cpu() / ratios[:, None]  # (M, L, P, 2) of the image
    weights = layer.weights[image_index, query].cpu()  # (M, L, P)
    largest = float(weights.max())
    biggest_px = max(3.0, min(picture.size) / 50)
    for level in range(weights.shape[1]):
        color = label_color(level)
        points = zip(locations[:, level].flatten(0, 1).tolist(), weights[:, level].flatten().tolist(), strict=True)
        for (x, y), weight in points:
            radius = max(1.0, biggest_px * (weight / largest) ** 0.5)
            x, y = x * width_px, y * height_px
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), outline=color, width=2)
    x, y = (layer.centres[image_index, query, 0].cpu() / ratios[0]).tolist()
    x, y = x * width_px, y * height_px
    draw.line((x - biggest_px, y, x + biggest_px, y), fill="white", width=2)
    draw.line((x, y - biggest_px, x, y + biggest_px), fill="white", width=2)
    return picture
