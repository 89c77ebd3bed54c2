"""Rows of class heads by name: COCO's tables, and another order or subset of rows."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from detr.checkpoints.places import Layout
from detr.structures import ClassTable

# ids of COCO's categories; eleven of 0 to 90 name none
_COCO_GAPS = frozenset({0, 12, 26, 29, 30, 45, 66, 68, 69, 71, 83})
# fmt: off
_COCO_NAMES = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet",
    "tv", "laptop", "mouse", "remote", "keyboard", "cell phone", "microwave", "oven", "toaster", "sink",
    "refrigerator", "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)
# fmt: on


def coco_class_table(num_classes: int) -> ClassTable:
    """COCO's classes as checkpoints number them: 80 rows without gaps, or 91 rows by category id.

    Raises:
        ValueError: Another number of classes, which names no table.
    """
    ids = [id for id in range(91) if id not in _COCO_GAPS]
    if num_classes == len(ids):
        return ClassTable(_COCO_NAMES, tuple(ids))
    if num_classes == 91:
        names = dict(zip(ids, _COCO_NAMES, strict=True))
        return ClassTable(tuple(names.get(id, "") for id in range(91)), tuple(range(91)))
    raise ValueError(
        f"the file has {num_classes} classes, which is not COCO (80 or 91); name them with classes=FILE, a COCO "
        "annotation file whose categories in the order of their ids are the rows"
    )


def select_rows(
    state: Mapping[str, Tensor], rows: Sequence[int], *, with_box_refine: bool, binary_proposals: bool
) -> dict[str, Tensor]:
    """Our state dict with only these `rows` of its class heads, in this order.

    Args:
        state: Of our model.
        rows: Rows of the class heads.
        with_box_refine: Of that model.
        binary_proposals: Channel 0 of the proposals' head says whether there is an object, whatever class row 0 is
            (`proposal_score=binary`); that row stays row 0 of this head.
    """
    layout = Layout.of(state, with_box_refine=with_box_refine)
    selected = {}
    for name, tensor in state.items():
        if not name.startswith("heads.class_embed."):
            selected[name] = tensor
            continue
        new = tensor[list(rows)]
        if layout.two_stage and binary_proposals and name.startswith(f"heads.class_embed.{layout.num_heads - 1}."):
            new[0] = tensor[0]
        selected[name] = new
    return selected


def named_rows(table: ClassTable) -> list[int]:
    """Rows that stand for a category."""
    return [row for row, name in enumerate(table.names) if name]
