"""Bytes of a picture -> upright pixels: the one decoder of shards, tables, `encode` and `train-tokenizer`."""

from __future__ import annotations

import io
import math
import re

import numpy as np
from PIL import Image

from .filters import aspect
from .source import LeftOut

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # by what the bytes say; crawls name any of them .jpg
MAX_PIXELS = 40_000_000  # of one image; a small file can unpack to gigabytes
MAX_SIDE = 65_535  # pixels, as JPEG's; Pillow fills skipped rows of a BMP before it looks how many there are
MAX_GIF_HEAD = 2**20  # bytes before a GIF's first picture; Pillow 11 joins its comments in quadratic time
ROWS = 64  # converted at a time
ORIENTATION = 0x0112  # the tag of EXIF
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
TO_8_BITS = ((np.arange(2**16) * 255 + 32767) // 65535).astype(np.uint8)


def decode_image(data: bytes, size: int, max_aspect: float = math.inf) -> np.ndarray:
    """Bytes of FORMATS -> the central square, scaled: uint8 (size, size, 3). The picture is turned upright as its EXIF
    says, transparency becomes white, greys of 16 bits keep their tones, and of an animation the first picture is taken.
    Colour profiles are not applied. Raises LeftOut."""
    try:
        if data[:4] == b"GIF8" and _first_picture(data) > MAX_GIF_HEAD:
            raise LeftOut("bad_image")
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise LeftOut("image_too_large") from None
    except Exception:  # Pillow's readers raise whatever broken bytes lead them to
        raise LeftOut("bad_image") from None
    with image:
        width, height = image.size
        if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
            raise LeftOut("image_too_large")
        if aspect(width, height) > max_aspect:
            raise LeftOut("aspect")
        try:
            depth = _depth(image)
            image.draft("RGB", (2 * size, 2 * size))  # lets the JPEG decoder skip what would be scaled away
            image.load()
            turn = UPRIGHT.get(_orientation(image))
            pixels = _on_white(image, depth)
            return np.asarray(_square(pixels if turn is None else pixels.transpose(turn), size))
        except Exception:
            raise LeftOut("bad_image") from None


def _first_picture(data: bytes) -> int:
    """Where it begins in a GIF. Raises IndexError where there is none."""
    at = 13 + (3 << ((data[10] & 7) + 1) if data[10] & 0x80 else 0)  # header, table of colours
    while data[at] != 0x2C:
        if data[at] == 0x21:  # an extension: its kind, then blocks that tell their length
            at += 2
            while data[at]:
                at += data[at] + 1
        at += 1
    return at


def _depth(image: Image.Image) -> int:
    """Bits of a PNG's channel in the file; 8 where nothing else is said. Pillow forgets them when it loads."""
    if image.format != "PNG" or not image.tile:
        return 8
    match = re.search(r";(\d+)", str(image.tile[0][3]))
    return int(match[1]) if match else 8


def _orientation(image: Image.Image) -> int:
    """As EXIF counts, 1 to 8; 1 where it says nothing or is damaged: the picture itself may be whole."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # as above
        return 1


def _on_white(image: Image.Image, depth: int) -> Image.Image:
    clear = image.info.get("transparency")
    if image.mode in ("RGBA", "LA", "PA") or clear is not None:
        image = _with_alpha(image, clear, depth).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return _eight_bits(image).convert("RGB")


def _with_alpha(image: Image.Image, clear: object, depth: int) -> Image.Image:
    """The picture with an alpha channel, or as Pillow can make one of it. A PNG names its transparent colour in the
    file's own depth, and Pillow compares that with pixels of 8 bits."""
    if image.mode.startswith("I"):
        alpha = Image.fromarray(np.where(np.asarray(image) == clear, np.uint8(0), np.uint8(255)))
        return Image.merge("LA", (_eight_bits(image), alpha))
    if image.mode == "L" and depth < 8 and isinstance(clear, int):
        image.info["transparency"] = clear * 255 // (2**depth - 1)
    elif image.mode == "RGB" and depth == 16 and isinstance(clear, tuple):
        image.info["transparency"] = tuple(value >> 8 for value in clear)
    return image


def _eight_bits(image: Image.Image) -> Image.Image:
    """Greys of 16 bits, which older Pillows call "I" and newer "I;16", as "L"; Pillow itself would make nearly all of
    them white. Others stay."""
    if not image.mode.startswith("I"):
        return image
    grey = np.asarray(image)
    eight = np.empty(grey.shape, np.uint8)
    for top in range(0, len(grey), ROWS):  # at once it would take ten times the picture's memory
        eight[top : top + ROWS] = TO_8_BITS[np.clip(grey[top : top + ROWS], 0, 65535)]
    return Image.fromarray(eight)


def _square(image: Image.Image, size: int) -> Image.Image:
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side))
    return square.resize((size, size), Image.Resampling.BICUBIC)
