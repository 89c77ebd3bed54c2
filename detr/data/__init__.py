"""Images and boxes, from files or drawn on the fly, to padded batches.

    files --layouts, sources (annotation_file, yolo, voc)--> COCO dict --annotation_entries--> CocoAnnotations
    data without a validation split --own_split, undivided--> one source --holdout--> the CocoAnnotations of both
    CocoAnnotations (flat arrays) --coco--> CocoDataset; health reports on them
    (seed, split, index) --placing, shapes, painting--> synthetic.SyntheticDataset
    dataset[index] --images, transforms--> (uint8 image, Target) --collate--> Batch --loader--> the engine

Both datasets have one interface (`DetectionDataset`). `DetectionData` holds the two splits of a run; the
functions `coco_data`, `custom_data` and `synthetic_data` make one, and are what configs/data names. Images stay
uint8 from the decoder to the device. Boxes are (x0, y0, x1, y1) in pixels up to the end of the transforms and
normalised (cx, cy, w, h) in a `Target`. The loader seeds every sample by (run seed, epoch, position in the epoch):
results depend neither on the number of workers nor on that of ranks.
"""

from detr.data.annotation_file import load_coco_annotations
from detr.data.annotations import CocoAnnotations
from detr.data.coco import CocoCounts, CocoDataset
from detr.data.collate import collate
from detr.data.dataset import DetectionDataset, Sample
from detr.data.detection_data import DetectionData, synthetic_data
from detr.data.epoch_order import EpochOrder, Sampling
from detr.data.faults import Fault, exit_code, format_faults
from detr.data.file_data import coco_data, custom_data
from detr.data.health import SplitReport, check_split, format_summary, summarize
from detr.data.images import IMAGE_SUFFIXES, read_image, read_image_size
from detr.data.layouts import SplitSource, find_coco_split, find_split
from detr.data.loader import DetectionLoader, build_train_loader, build_val_loader
from detr.data.own_split import find_own_split, find_parts
from detr.data.samplers import Draw, EvalSampler, TrainSampler
from detr.data.synthetic import SyntheticDataset
from detr.data.transforms import (
    DetectionTransform,
    EvalTransform,
    detr_augmentation,
    flip_and_resize,
    large_scale_jitter,
    strong_augmentation,
)

__all__ = [
    "IMAGE_SUFFIXES",
    "CocoAnnotations",
    "CocoCounts",
    "CocoDataset",
    "DetectionData",
    "DetectionDataset",
    "DetectionLoader",
    "DetectionTransform",
    "Draw",
    "EpochOrder",
    "EvalSampler",
    "EvalTransform",
    "Fault",
    "Sample",
    "Sampling",
    "SplitReport",
    "SplitSource",
    "SyntheticDataset",
    "TrainSampler",
    "build_train_loader",
    "build_val_loader",
    "check_split",
    "coco_data",
    "collate",
    "custom_data",
    "detr_augmentation",
    "exit_code",
    "find_coco_split",
    "find_own_split",
    "find_parts",
    "find_split",
    "flip_and_resize",
    "format_faults",
    "format_summary",
    "large_scale_jitter",
    "load_coco_annotations",
    "read_image",
    "read_image_size",
    "strong_augmentation",
    "summarize",
    "synthetic_data",
]
