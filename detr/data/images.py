"""Image files of any kind to uint8 RGB tensors."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".avif", ".mpo", ".ppm", ".pgm")
)

# an image of more pixels is refused before it is decoded; Pillow refuses the same
MAX_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 2**26)

_JPEG_START = b"\xff\xd8\xff"
# what Pillow raises on bytes it cannot make an image of
_PILLOW_ERRORS = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)


def read_image(path: str | Path, *, apply_exif: bool = True) -> Tensor:
    """Read an image file as RGB.

    JPEGs go through torchvision, which is bit-equal to Pillow there and 1.5 times as fast; Pillow gets the
    other formats and the JPEGs that torchvision refuses, and its verdict is final. Gray, palette and CMYK
    become RGB, an alpha channel is dropped, 16-bit samples are divided by 256 (so that 65535 becomes 255),
    and an animation gives its first frame.

    Args:
        path: The file.
        apply_exif: Turn the image as its EXIF orientation says, as viewers do.

    Returns:
        (3, h, w) uint8 in [0, 255], not necessarily contiguous.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is truncated, broken, not an image, or of more than `MAX_PIXELS` pixels.
    """
    path = Path(path)
    encoded = np.fromfile(_existing(path), dtype=np.uint8)
    if encoded[:3].tobytes() == _JPEG_START and 0 < _num_jpeg_pixels(encoded) <= MAX_PIXELS:
        try:
            return decode_jpeg(torch.from_numpy(encoded), mode=ImageReadMode.RGB, apply_exif_orientation=apply_exif)
        except RuntimeError:
            pass  # Pillow is next, and its message names what is wrong
    try:
        with Image.open(path) as image:
            pixels = _rgb_array(ImageOps.exif_transpose(image) if apply_exif else image, image.format)
    except _PILLOW_ERRORS as error:
        raise ValueError(
            f"cannot read the image {path} ({error}). The file is truncated, broken or not an image: replace "
            "it, or leave it out"
        ) from error
    return torch.from_numpy(pixels).permute(2, 0, 1)  # (h, w, 3) -> (3, h, w)


def image_to_tensor(image: Image.Image | np.ndarray, *, apply_exif: bool = True) -> Tensor:
    """An image in memory as RGB, like `read_image` of its file.

    Args:
        image: A Pillow image of any mode, or (h, w, 3) uint8 RGB.
        apply_exif: Turn a Pillow image as its EXIF orientation says; arrays have none.

    Returns:
        (3, h, w) uint8 in [0, 255], not necessarily contiguous.

    Raises:
        ValueError: The array is no such image, or the samples of a Pillow image have no known range.
    """
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ValueError(
                f"an array must be an image (h, w, 3) of uint8 in RGB; got {image.dtype} of shape {image.shape}. "
                "Convert it, as with PIL.Image.fromarray(array).convert('RGB'); OpenCV's BGR becomes RGB with "
                "array[..., ::-1]"
            )
        # PyTorch takes no negative strides, as a flip of the channels leaves them
        pixels = np.array(image)
    else:
        pixels = _rgb_array(ImageOps.exif_transpose(image) if apply_exif else image, image.format)
    return torch.from_numpy(pixels).permute(2, 0, 1)  # (h, w, 3) -> (3, h, w)


def read_image_size(path: str | Path, *, apply_exif: bool = True) -> tuple[int, int]:
    """(h, w) in pixels of an image file from its header, without decoding it.

    Args:
        path: The file.
        apply_exif: Whether to count the EXIF orientation in, as `read_image` does.
    """
    path = _existing(Path(path))
    try:
        with Image.open(path) as image:
            w, h = image.size
            # orientations 5 to 8 turn by a quarter; 0x0112 is the tag's number in EXIF
            quarter_turn = apply_exif and _exif(image, path).get(0x0112, 1) in (5, 6, 7, 8)
    except _PILLOW_ERRORS as error:
        raise ValueError(
            f"cannot read the size of the image {path} ({error}). Replace it, or give height and width in the "
            "annotations"
        ) from error
    return (w, h) if quarter_turn else (h, w)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"there is no image file {path.absolute()}")
    return path


def _exif(image: Image.Image, path: Path) -> Image.Exif:
    """The EXIF block of an opened image. A PNG is decoded only for metadata behind its pixels."""
    if image.format == "PNG" and not _png_has_late_metadata(path):
        # the method of PNG images decodes every image that has no EXIF before its pixels
        return Image.Image.getexif(image)
    return image.getexif()


def _png_has_late_metadata(path: Path) -> bool:
    """Whether a PNG file has EXIF or text after the first pixels; walks its chunks without reading them."""
    seen_pixels = False
    with path.open("rb") as stream:
        stream.seek(8)
        while len(header := stream.read(8)) == 8 and header[4:] != b"IEND":
            seen_pixels = seen_pixels or header[4:] == b"IDAT"
            if seen_pixels and header[4:] in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
                return True
            # the data and their checksum
            stream.seek(int.from_bytes(header[:4], "big") + 4, 1)
    return False


def _num_jpeg_pixels(encoded: np.ndarray) -> int:
    """Width times height of a JPEG from its frame header, without decoding; 0 where none is found."""
    position = 2
    while position + 9 <= len(encoded):
        if encoded[position] != 0xFF:
            return 0
        marker = int(encoded[position + 1])
        if marker == 0xFF:  # a fill byte
            position += 1
        elif marker in (0x01, *range(0xD0, 0xD9)):  # markers without a segment
            position += 2
        # start of frame: 0xC0 to 0xCF, but for the tables 0xC4, 0xC8 and 0xCC
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            h, w = encoded[position + 5 : position + 9].view(">u2").tolist()
            return h * w
        else:
            position += 2 + int(encoded[position + 2]) * 256 + int(encoded[position + 3])
    return 0


def _rgb_array(image: Image.Image, file_format: str | None) -> np.ndarray:
    """(h, w, 3) uint8 of an opened image."""
    if image.mode.startswith("I;16") or (image.mode == "I" and file_format == "PNG"):
        # Pillow's own conversion clips at 255 instead of scaling
        gray = (np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8)
        return np.repeat(gray[..., None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its samples are of Pillow's mode {image.mode} (32 bits), whose range is not known; convert it to "
            "8 or 16 bits"
        )
    return np.array(image.convert("RGB"))
