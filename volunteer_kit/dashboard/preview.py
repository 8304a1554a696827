"""The picture that stands beside a link to a run: its newest pictures side by side, 1200 x 630 pixels."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 1200, 630  # pixels; what messengers and social networks ask for
GROUND, TEXT = "#14181e", "#e6e9ee"
LARGEST_SIDE = 2048  # pixels of one picture
GAP = 24


def preview(title: str, pictures: Sequence[Path]) -> bytes:
    """A PNG. Pictures that cannot be read are left out; without any, the title stands alone."""
    canvas = Image.new("RGB", (WIDTH, HEIGHT), GROUND)
    tiles = [tile for path in pictures[:6] if (tile := _opened(path)) is not None]
    if tiles:
        _lay(canvas, tiles)
    else:
        _write(canvas, title)
    out = io.BytesIO()
    canvas.save(out, "PNG", optimize=True)
    return out.getvalue()


def _opened(path: Path) -> Image.Image | None:
    try:
        with Image.open(path, formats=("PNG",)) as image:
            return image.convert("RGB") if max(image.size) <= LARGEST_SIDE else None
    except (OSError, ValueError, SyntaxError):
        return None


def _lay(canvas: Image.Image, tiles: Sequence[Image.Image]) -> None:
    """In one row or two, as large as they fit; pixels of small pictures stay square."""
    rows = 1 if len(tiles) <= 2 else 2
    columns = math.ceil(len(tiles) / rows)
    side = min((WIDTH - GAP * (columns + 1)) // columns, (HEIGHT - GAP * (rows + 1)) // rows)
    left = (WIDTH - columns * side - (columns - 1) * GAP) // 2
    top = (HEIGHT - rows * side - (rows - 1) * GAP) // 2
    for number, tile in enumerate(tiles):
        how = Image.Resampling.NEAREST if max(tile.size) < side // 3 else Image.Resampling.LANCZOS
        row, column = divmod(number, columns)
        canvas.paste(tile.resize((side, side), how), (left + column * (side + GAP), top + row * (side + GAP)))


def _write(canvas: Image.Image, title: str) -> None:
    font = ImageFont.load_default(64)
    ImageDraw.Draw(canvas).text((WIDTH / 2, HEIGHT / 2), title[:32], fill=TEXT, font=font, anchor="mm")
