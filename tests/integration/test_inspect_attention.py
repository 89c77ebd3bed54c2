"""Statistics and pictures of attention from the command line."""

import json
from collections.abc import Callable
from pathlib import Path

from PIL import Image

Tool = Callable[..., str]


def test_statistics_and_pictures(tool: Tool, refused: Tool, tiny: tuple[str, ...], tmp_path: Path):
    tool("train", *tiny)
    assert "# debug_cpu" in (tmp_path / "outputs" / "debug_cpu" / "MODEL_CARD.md").read_text()
    photos = tmp_path / "photos"
    photos.mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (70, 50), "navy").save(photos / f"{name}.png")
    (photos / "c.png").write_bytes(b"no image")
    command = ("inspect_attention", "checkpoint=outputs/debug_cpu/best.pt", "source=photos", "device=cpu")
    out = tool(*command, "num_drawn=1")
    assert "left out" in out
    folder = tmp_path / "outputs" / "inspect_attention_debug_cpu_best_photos"
    content = json.loads((folder / "sampling.json").read_text())
    assert content["num_images"] == 2
    layers = {row["layer"] for row in content["rows"]}
    assert {"encoder.layers.0", "decoder.layers.0"} <= layers
    [picture] = folder.glob("*.png")
    # the image, the cross of the query, and samples, which lie on one another in an untrained decoder
    assert len(Image.open(picture).convert("RGB").getcolors(1 << 16)) >= 3
    tool(*command, "num_drawn=2", "layer=encoder.layers.0", "output_dir=encoder")
    assert len(list((tmp_path / "encoder").glob("*_encoder.layers.0_query_*.png"))) == 2
    assert "is none of encoder.layers.0" in refused(*command, "layer=encoder.layers.9")
