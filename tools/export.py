"""Turn a checkpoint into one file that runs without this project: ONNX, torch.export or AOTInductor.

Keys:
  checkpoint=FILE        needed: best.pt of a run, or a file of tools/import_weights.py
  format=onnx            onnx | torch_export | aot_inductor
  height=null            padded size in pixels that images fit into; null: that of evaluation, where it has one
  width=null             likewise
  top_k=100              detections an image

Examples:
  python tools/export.py checkpoint=outputs/NAME/best.pt
  python tools/export.py checkpoint=outputs/NAME/best.pt format=aot_inductor height=800 width=1333

Output:
  outputs/export (output_dir=): model.onnx, model.pt2 or the like, and model.json with classes, sizes and
  preprocessing. The file's detections are compared with the checkpoint's, and a script that runs it is printed.
"""

from typing import get_args

import torch
from omegaconf import DictConfig, OmegaConf

from detr.engine.checkpoint import Checkpoint, load_checkpoint
from detr.engine.run_folder import open_result_folder, write_config, write_json
from detr.inference.export import (
    SUFFIXES,
    ExportableDetector,
    ExportFormat,
    check_exported,
    load_exported,
    milliseconds_an_image,
    require_exporter,
    trace,
    write_program,
)
from detr.inference.export_usage import describe_export, exported_size, usage
from tools.launcher import hydra_tool, resolved
from tools.saved_model import build_detector

MODEL_INFO = "model.json"


@hydra_tool("export")
def main(cfg: DictConfig) -> None:
    if cfg.checkpoint is None or cfg.format not in get_args(ExportFormat):
        raise ValueError(
            f"tools/export.py needs checkpoint=FILE and format= one of {', '.join(get_args(ExportFormat))}; got "
            f"checkpoint={cfg.checkpoint} and format={cfg.format}"
        )
    config = resolved(cfg)
    folder = open_result_folder(cfg.output_dir, config)
    checkpoint: Checkpoint = load_checkpoint(cfg.checkpoint)
    require_exporter(cfg.format)
    height, width = exported_size(checkpoint.preprocessing, cfg.height, cfg.width)
    # the plain PyTorch form of the attention, which every runtime knows
    kernel = OmegaConf.create({"_target_": "ops.KernelConfig", "backend": "reference"})
    model = build_detector(checkpoint, kernel=kernel, source=cfg.checkpoint, device=torch.device("cpu"))
    detector = ExportableDetector(model, cfg.top_k)
    write_config(folder, config)
    path = folder / f"model{SUFFIXES[cfg.format]}"
    print(f"tracing {cfg.checkpoint} at {height} x {width}, any number of images at once", flush=True)
    write_program(trace(detector, height, width), cfg.format, path)
    write_json(folder / MODEL_INFO, describe_export(checkpoint, height, width, cfg.top_k))
    print(f"wrote {path} ({path.stat().st_size / 2**20:.0f} MiB) and {folder / MODEL_INFO}", flush=True)
    try:
        run = load_exported(cfg.format, path)
    except ImportError as error:
        print(f"not compared with the checkpoint: {error}")
    else:
        score, box = check_exported(detector, run, height, width)
        print(f"compared with the checkpoint on noise: scores within {score:.0e}, boxes within {box:.0e} of the image")
        print(f"{milliseconds_an_image(run, height, width):.0f} ms an image on this CPU")
    print(f"\nTo run it:\n\n{usage(cfg.format, path, height, width)}")


if __name__ == "__main__":
    main()
