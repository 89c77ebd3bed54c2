"""Images and boxes, from files or drawn on the fly, to padded batches.

    annotation file --annotation_file--> CocoAnnotations (flat arrays) --coco--> CocoDataset
    (seed, split, index) --placing, shapes, painting--> synthetic.SyntheticDataset
    dataset[index] --images, transforms--> (uint8 image, Target) --collate--> Batch --loader--> the engine

Both datasets have one interface (`DetectionDataset`). `DetectionData` holds the two splits of a run; the
functions `coco_data` and `synthetic_data` make one, and are what configs/data names. Images stay uint8 from the
decoder to the device. Boxes are (x0, y0, x1, y1) in pixels up to the end of the transforms and normalised
(cx, cy, w, h) in a `Target`. The loader seeds every sample by (run seed, epoch, position in the epoch): results
depend neither on the number of workers nor on that of ranks.
"""

from detr.data.annotation_file import load_coco_annotations
from detr.data.annotations import CocoAnnotations
from detr.data.coco import CocoCounts, CocoDataset
from detr.data.collate import collate
from detr.data.dataset import DetectionDataset, Sample
from detr.data.detection_data import DetectionData, coco_data, synthetic_data
from detr.data.images import read_image, read_image_size
from detr.data.layouts import find_coco_split
from detr.data.loader import DetectionLoader, build_train_loader, build_val_loader
from detr.data.samplers import Draw, EvalSampler, TrainSampler
from detr.data.synthetic import SyntheticDataset
from detr.data.transforms import DetectionTransform, EvalTransform, detr_augmentation, flip_and_resize

__all__ = [
    "CocoAnnotations",
    "CocoCounts",
    "CocoDataset",
    "DetectionData",
    "DetectionDataset",
    "DetectionLoader",
    "DetectionTransform",
    "Draw",
    "EvalSampler",
    "EvalTransform",
    "Sample",
    "SyntheticDataset",
    "TrainSampler",
    "build_train_loader",
    "build_val_loader",
    "coco_data",
    "collate",
    "detr_augmentation",
    "find_coco_split",
    "flip_and_resize",
    "load_coco_annotations",
    "read_image",
    "read_image_size",
    "synthetic_data",
]
