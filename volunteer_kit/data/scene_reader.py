"""Reads a generated picture back into words: analysis by synthesis with matched filters.

Every shape, size and place (up to SLACK pixels beside it) is a template; the one that explains most of what differs
from the background is what is seen, and its least-squares colour is the object's. Nothing here knows the caption,
only how many objects to look for; what the templates leave unexplained makes the reading fail.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image

from .scenes import BACKGROUNDS, CENTRES, COLOURS, GRID, PLACES, SHAPES, SIZES, Scene, Thing, coverage

MAX_COLOUR_DISTANCE = 75.0  # of 255, Euclidean in RGB; the palette's closest two are 94 apart
# True scenes through the shipped autoencoder stay under 0.118, 4 and 0.136. Looser limits, for blurred pictures, let
# half-drawn shapes pass and flattered the model; without the last one, a circle with two square corners was a circle.
MAX_FIT_ERROR = 0.12  # of the energy around an object
MAX_UNEXPLAINED = 6  # pixels off the edges, for each object; the smallest object has 32
MAX_CELL_ERROR = 0.18  # of an object's contrast, in any 4x4 pixels: what one code of the shipped autoencoder draws
SLACK = 1  # pixels an object may lie beside its place; places are 8 apart


@dataclass(frozen=True)
class _Fit:
    thing: Thing
    slot: str
    colour: np.ndarray  # (3,), measured
    cover: np.ndarray  # (32, 32), of the best template
    error: float  # squared error over energy, in a box around the object


def read_picture(image: np.ndarray, level: int) -> tuple[Scene | None, tuple[str, ...]]:
    """Read `level` objects from an image (S, S, 3), uint8 or float in [0, 1] -> the scene, or None if the picture
    shows something else; the colours: background first, then the objects' in alphabetical order, "none" where
    there is no colour of the palette. Raises ValueError for another shape."""
    pixels = _to_grid(image)
    corners = np.concatenate([pixels[y, x].reshape(-1, 3) for y in _ENDS for x in _ENDS])  # (64, 3)
    ground = np.median(corners, axis=0)
    background = _name(ground, {**BACKGROUNDS, **COLOURS})
    if level == 1:
        readings = [[_fit(pixels, ground, tuple(PLACES))]]
    else:
        pairs = (("left", "right"), ("above", "below"))
        readings = [[_fit(pixels, ground, (slot,)) for slot in pair] for pair in pairs]
    fits = min(readings, key=lambda fits: sum(9.0 if f is None else f.error for f in fits))
    colours = (background, *sorted("none" if f is None else f.thing.colour for f in fits))
    if "none" in colours or background not in BACKGROUNDS:
        return None, colours
    drawn = _draw(ground, fits)
    if (
        max(f.error for f in fits) > MAX_FIT_ERROR
        or _unexplained(pixels, drawn, fits) > MAX_UNEXPLAINED * level
        or _worst_cell(pixels, drawn) > MAX_CELL_ERROR * max(((f.colour - ground) ** 2).sum() for f in fits)
    ):
        return None, colours
    return Scene(tuple(f.thing for f in fits), fits[0].slot, background), colours


def _to_grid(image: np.ndarray) -> np.ndarray:
    """-> float32 (32, 32, 3) in [0, 255]"""
    image = np.asarray(image)
    if image.ndim != 3 or image.shape[0] != image.shape[1] or image.shape[2] != 3:
        raise ValueError(f"an image to check has the shape (S, S, 3), this one has {image.shape}")
    if image.dtype != np.uint8:
        image = np.rint(255 * np.clip(np.nan_to_num(image.astype(np.float32)), 0, 1)).astype(np.uint8)
    if image.shape[0] != GRID:
        image = np.asarray(Image.fromarray(image).resize((GRID, GRID), Image.Resampling.BOX))
    return image.astype(np.float32)


_ENDS = (slice(0, 4), slice(GRID - 4, GRID))
_REGIONS = {
    "left": (slice(None), slice(0, 16)),
    "right": (slice(None), slice(16, None)),
    "above": (slice(0, 16), slice(None)),
    "below": (slice(16, None), slice(None)),
}


def _name(colour: np.ndarray, palette: dict[str, tuple[int, int, int]]) -> str:
    distances = np.linalg.norm(np.array(list(palette.values()), np.float32) - colour, axis=1)
    best = int(distances.argmin())
    return list(palette)[best] if distances[best] <= MAX_COLOUR_DISTANCE else "none"


def _fit(pixels: np.ndarray, ground: np.ndarray, slots: tuple[str, ...]) -> _Fit | None:
    """The one object at one of `slots` that explains the pixels best; with one slot, only its half is looked at."""
    away = (pixels - ground) @ _TO_LUMA.T  # (32, 32, 3)
    if len(slots) == 1:
        half = np.zeros((GRID, GRID, 1), np.float32)
        half[_REGIONS[slots[0]]] = 1
        away = away * half
    if (np.linalg.norm(away, axis=-1) > 45).sum() < 10:  # noise of 8 per channel stays under it; an object has 32
        return None
    names, luma, chroma = _templates(slots)  # K names, (K, 1024), (K, 1024); rows of length 1
    flat = away.reshape(-1, 3)
    steps = np.concatenate([luma @ flat[:, :1], chroma @ flat[:, 1:]], axis=1)  # (K, 3), each template's best colour
    explained = (steps**2).sum(axis=1)  # (K,)
    best = int(explained.argmax())
    shape, size, slot, scale = names[best]
    colour = ground + (steps[best] * scale) @ _TO_LUMA
    cover = luma[best].reshape(GRID, GRID) / scale[0]
    drawn = np.stack([luma[best] * steps[best, 0], *(chroma[best] * step for step in steps[best, 1:])], axis=1)
    near = _window(cover).ravel()
    error = float(((flat - drawn)[near] ** 2).sum() / max((flat[near] ** 2).sum(), 1.0))
    return _Fit(Thing(size, _name(colour, COLOURS), shape), slot, colour, cover, error)


_TO_LUMA = np.linalg.qr(np.array([[1, 1, 1], [1, -1, 0], [1, 1, -2]], np.float32).T)[0].T  # rotates RGB: grey first


@lru_cache(maxsize=8)
def _templates(slots: tuple[str, ...]) -> tuple[list[tuple[str, str, str, np.ndarray]], np.ndarray, np.ndarray]:
    """Every shape and size at every place, up to SLACK pixels beside it, sharp, blurred as an autoencoder does and
    with blurred colours only, as JPEG does -> (shape, size, slot, scales) by row and the rows for brightness and
    for colour (K, 32*32), made 1 long by the scales (3,)."""
    names, luma, chroma = [], [], []
    beside = range(-SLACK, SLACK + 1)
    for shape, size, slot, dx, dy in itertools.product(SHAPES, SIZES, slots, beside, beside):
        x, y = CENTRES[slot]
        sharp = np.array(coverage(shape, SIZES[size], x + dx, y + dy))
        blurred = _blur(sharp)
        for bright, coloured in ((sharp, sharp), (blurred, blurred), (sharp, _blur(blurred))):
            if len(slots) == 1:
                bright, coloured = _only(bright, slot), _only(coloured, slot)
            scales = np.array([1 / np.linalg.norm(bright), *[1 / np.linalg.norm(coloured)] * 2], np.float32)
            names.append((shape, size, slot, scales))
            luma.append(bright.ravel() * scales[0])
            chroma.append(coloured.ravel() * scales[1])
    return names, np.stack(luma), np.stack(chroma)


def _window(cover: np.ndarray) -> np.ndarray:
    """The box around a shape and 3 pixels more -> bool (32, 32)."""
    rows, columns = np.flatnonzero(cover.max(1) > 0.1), np.flatnonzero(cover.max(0) > 0.1)
    window = np.zeros(cover.shape, bool)
    window[max(rows[0] - 3, 0) : rows[-1] + 4, max(columns[0] - 3, 0) : columns[-1] + 4] = True
    return window


def _blur(image: np.ndarray) -> np.ndarray:
    padded = np.pad(image, 1)
    rows = 0.25 * padded[:-2] + 0.5 * padded[1:-1] + 0.25 * padded[2:]
    return 0.25 * rows[:, :-2] + 0.5 * rows[:, 1:-1] + 0.25 * rows[:, 2:]


def _only(image: np.ndarray, slot: str) -> np.ndarray:
    kept = np.zeros_like(image)
    kept[_REGIONS[slot]] = image[_REGIONS[slot]]
    return kept


def _draw(ground: np.ndarray, fits: list[_Fit]) -> np.ndarray:
    """The picture that `fits` describe -> (32, 32, 3)."""
    drawn = np.broadcast_to(ground, (GRID, GRID, 3)).astype(np.float32)
    for fit in fits:
        drawn = drawn + fit.cover[..., None] * (fit.colour - drawn)
    return drawn


def _worst_cell(pixels: np.ndarray, drawn: np.ndarray) -> float:
    """Largest mean squared difference in any 4x4 pixels, summed over colours."""
    error = ((pixels - drawn) ** 2).sum(axis=-1)  # (32, 32)
    return float(np.lib.stride_tricks.sliding_window_view(error, (4, 4)).mean(axis=(2, 3)).max())


def _unexplained(pixels: np.ndarray, drawn: np.ndarray, fits: list[_Fit]) -> int:
    """Pixels that differ from the picture drawn from `fits`, its edges not counted."""
    edge = np.zeros(pixels.shape[:2], bool)
    for fit in fits:
        padded = np.pad(fit.cover, 1, mode="edge")
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3))  # (32, 32, 3, 3)
        edge |= windows.max(axis=(2, 3)) - windows.min(axis=(2, 3)) > 0.25
    return int(((np.linalg.norm(pixels - drawn, axis=-1) > 60) & ~edge).sum())
