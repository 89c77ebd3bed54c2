"""Make a checkpoint of this project from weights of another codebase, or the other way round.

Keys:
  source=CODEBASE        needed, whose weights: original | hf | mmdet | detrex | ours
  file=FILE              needed: .pth, .bin or .safetensors, a folder of Hugging Face, or a checkpoint of ours
  model=deformable_detr  what was trained: deformable_detr | refine | two_stage | single_scale
  backbone=resnet50      with which backbone
  to=ours                ours | original | hf | mmdet | detrex
  classes=null           COCO annotation file that names the class rows by id; null: COCO's 80 or 91

Examples:
  python tools/import_weights.py source=original file=r50_deformable_detr-checkpoint.pth
  python tools/import_weights.py source=hf file=FOLDER model=refine
  python tools/import_weights.py source=ours file=outputs/NAME/best.pt to=hf

Output:
  outputs/import_weights (output_dir=): imported.pt, for checkpoint= of the other tools and init_from= of
  tools/train.py; with to=NAME the weights by that codebase's names. Every tensor must find its place: otherwise
  nothing is written, and a table says what did not fit and why.
"""

from pathlib import Path
from typing import Any, get_args

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from detr.checkpoints.convert import Codebase, guess_codebase, num_classes_in
from detr.checkpoints.files import read_tensors
from detr.engine.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from detr.engine.convert_checkpoint import class_table_of, export_checkpoint, import_checkpoint
from tools.launcher import hydra_tool, resolved

IMPORTED = "imported.pt"


@hydra_tool("import_weights")
def main(cfg: DictConfig) -> None:
    names = (*get_args(Codebase), "ours")
    if cfg.file is None or cfg.source not in names or cfg.to not in names or cfg.source == cfg.to:
        raise ValueError(
            f"tools/import_weights.py needs file=FILE, source= and to=, two different ones of {', '.join(names)}; got "
            f"file={cfg.file}, source={cfg.source} and to={cfg.to}"
        )
    folder = Path(cfg.output_dir)
    target = folder / IMPORTED
    if cfg.to == "ours" and target.exists():
        raise ValueError(f"{target} exists; give another name=")
    checkpoint = load_checkpoint(cfg.file) if cfg.source == "ours" else read_other(cfg)
    if cfg.to != "ours":
        for path in export_checkpoint(checkpoint, cfg.to, folder):
            print(f"wrote {path}")
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(checkpoint, target)
    table = checkpoint.class_table
    print(
        f"wrote {target}: {len(checkpoint.model)} tensors, {table.num_classes} classes ({', '.join(table.names[:4])}"
        f"{', ...' if table.num_classes > 4 else ''})\n"
        f"  python tools/evaluate.py checkpoint={target} data.root=COCO_FOLDER\n"
        f"  python tools/predict.py checkpoint={target} source=photos/\n"
        f"  python tools/train.py init_from={target} model=... backbone=... data.root=YOUR_FOLDER"
    )


def read_other(cfg: DictConfig) -> Checkpoint:
    """A checkpoint from a file of another codebase; prints what was done to its tensors."""
    tensors = read_tensors(cfg.file)
    found = guess_codebase(tensors)
    if found is not None and found != cfg.source:
        raise ValueError(
            f"{cfg.file} has the names of {found} ({', '.join(list(tensors)[:2])}, ...), not of {cfg.source}; use "
            f"source={found}"
        )
    config: dict[str, Any] = resolved(cfg)
    config["model"]["backbone"]["pretrained"] = False
    with torch.device("meta"):
        model = instantiate(OmegaConf.create(config["model"]), num_classes=num_classes_in(tensors)).state_dict()
    imported = import_checkpoint(
        tensors,
        cfg.source,
        model,
        class_table=None if cfg.classes is None else class_table_of(Path(cfg.classes)),
        rows=cfg.rows,
        config={name: config[name] for name in ("model", "data")},
        preprocessing={
            "resize": instantiate(cfg.transforms.eval).describe(),
            "apply_exif": cfg.data.apply_exif,
            "pad_to": cfg.data.pad_to,
        },
        source=str(cfg.file),
    )
    for note in imported.notes:
        print(note)
    return imported.checkpoint


if __name__ == "__main__":
    main()
