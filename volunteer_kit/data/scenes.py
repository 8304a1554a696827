"""Generated text-image pairs that need no download, and a checker that reads a picture back.

Level 1 is one object ("a large red circle on the left of a grey background"), level 2 two objects and a relation
("a large red circle left of a small blue square on a grey background"). A caption has exactly one picture: nothing
is drawn at random, so that minutes of training can show whether a model reads its captions. What is judged are
captions whose combination of words never occurs in training (`is_held_out`). Sizes and places lie on a grid of
4 pixels in a 32x32 picture, where the shipped image tokenizer has one code for 4x4 pixels.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .source import Raw, Record

LEVELS: tuple[int, ...] = (1, 2)
GRID = 32  # pixels; the picture's own resolution, other sizes are scaled
SIZES: dict[str, int] = {"large": 16, "small": 8}  # pixels of GRID, the box around a shape
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "diamond")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (205, 25, 30),
    "orange": (255, 150, 20),
    "yellow": (250, 235, 60),
    "green": (20, 135, 50),
    "cyan": (50, 210, 220),
    "blue": (40, 70, 215),
    "purple": (130, 30, 185),
    "pink": (250, 140, 195),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "grey": (125, 125, 125),
    "white": (245, 245, 245),
    "black": (15, 15, 15),
}
PLACES: dict[str, str] = {"left": "on the left of", "centre": "in the centre of", "right": "on the right of"}
RELATIONS: dict[str, str] = {"left": "left of", "right": "right of", "above": "above", "below": "below"}
MIRROR: dict[str, str] = {"left": "right", "right": "left", "above": "below", "below": "above"}
CENTRES: dict[str, tuple[int, int]] = {
    "left": (8, 16),
    "centre": (16, 16),
    "right": (24, 16),
    "above": (16, 8),
    "below": (16, 24),
}  # (x, y) in pixels of GRID
HELD_OUT_ONE_IN = 10

_THING = rf"a ({'|'.join(SIZES)}) ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})"
_GROUND = rf"a ({'|'.join(BACKGROUNDS)}) background"
_ONE = re.compile(rf"{_THING} ({'|'.join(PLACES.values())}) {_GROUND}")
_TWO = re.compile(rf"{_THING} ({'|'.join(RELATIONS.values())}) {_THING} on {_GROUND}")


@dataclass(frozen=True)
class Thing:
    """One object: `size` of SIZES, `colour` of COLOURS, `shape` of SHAPES."""

    size: str
    colour: str
    shape: str

    def __str__(self) -> str:
        return f"a {self.size} {self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """One or two things before a background. `where` is a key of PLACES for one thing; for two it is the key of
    RELATIONS that says where the first lies, seen from the second."""

    things: tuple[Thing, ...]
    where: str
    background: str

    @property
    def level(self) -> int:
        return len(self.things)

    @property
    def caption(self) -> str:
        """The sentence that names everything in the scene; `parse_caption` is its inverse."""
        if self.level == 1:
            return f"{self.things[0]} {PLACES[self.where]} a {self.background} background"
        return f"{self.things[0]} {RELATIONS[self.where]} {self.things[1]} on a {self.background} background"

    @property
    def slots(self) -> tuple[str, ...]:
        """For each thing the key of CENTRES where it lies."""
        return (self.where,) if self.level == 1 else (self.where, MIRROR[self.where])

    def mirrored(self) -> Scene:
        """The other description of the same picture ("B right of A" for "A left of B"); itself at level 1."""
        if self.level == 1:
            return self
        return Scene(self.things[::-1], MIRROR[self.where], self.background)

    def render(self, size: int = GRID) -> np.ndarray:
        """-> the scene's one picture, uint8 (size, size, 3), edges anti-aliased."""
        image = np.empty((size, size, 3), np.float32)
        image[:] = BACKGROUNDS[self.background]
        for thing, slot in zip(self.things, self.slots, strict=True):
            cover = coverage(thing.shape, SIZES[thing.size], *CENTRES[slot], size)[..., None]  # (S, S, 1)
            image += cover * (np.asarray(COLOURS[thing.colour], np.float32) - image)
        return np.rint(image).astype(np.uint8)


@lru_cache(maxsize=4096)
def coverage(shape: str, box: int, x: float, y: float, size: int = GRID) -> np.ndarray:
    """How much of each pixel a shape covers. `box` (its width) and its centre `x`, `y` are in pixels of GRID.
    -> float32 (size, size) in [0, 1]; one shared array, do not write to it."""
    fine = 4  # samples a pixel and axis
    ticks = (np.arange(size * fine) + 0.5) * (GRID / (size * fine))
    u, v = (ticks[None, :] - x) / (box / 2), (ticks[:, None] - y) / (box / 2)  # the box is [-1, 1] x [-1, 1]
    inside = (abs(u) <= 1) & (abs(v) <= 1)
    if shape == "circle":
        inside &= u * u + v * v <= 1
    elif shape == "triangle":
        inside &= abs(u) <= (v + 1) / 2
    elif shape == "diamond":
        inside &= abs(u) + abs(v) <= 1
    elif shape != "square":
        raise ValueError(f"unknown shape {shape!r}: choose from {', '.join(SHAPES)}")
    cover = inside.reshape(size, fine, size, fine).mean(axis=(1, 3)).astype(np.float32)
    cover.setflags(write=False)
    return cover


def parse_caption(caption: str) -> Scene:
    """Caption -> Scene, case and spacing forgiven. Raises ValueError for any other sentence."""
    text = " ".join(caption.lower().split()).rstrip(".")
    if match := _ONE.fullmatch(text):
        size, colour, shape, where, ground = match.groups()
        return Scene((Thing(size, colour, shape),), _key(PLACES, where), ground)
    if match := _TWO.fullmatch(text):
        first, where, second, ground = match.groups()[:3], match[4], match.groups()[4:7], match[8]
        if first[1] == second[1]:
            raise ValueError(f"not a scene: both objects are {first[1]} in {caption!r}; give them two colours")
        return Scene((Thing(*first), Thing(*second)), _key(RELATIONS, where), ground)
    raise ValueError(
        f"not the caption of a scene: {caption!r}\nSay it like this: {_EXAMPLES[0]!r} or {_EXAMPLES[1]!r}, with"
        f" sizes {', '.join(SIZES)}; colours {', '.join(COLOURS)}; shapes {', '.join(SHAPES)};"
        f" backgrounds {', '.join(BACKGROUNDS)}"
    )


def _key(phrases: dict[str, str], phrase: str) -> str:
    return next(key for key, words in phrases.items() if words == phrase)


_EXAMPLES = (
    "a large red circle on the left of a grey background",
    "a large red circle left of a small blue square on a grey background",
)


def is_held_out(scene: Scene) -> bool:
    """Whether this combination is kept out of training: one in ten, by a fixed hash. The two captions of one
    picture fall on the same side, so that no held-out picture is seen under its other name."""
    name = min(scene.caption, scene.mirrored().caption)
    return int.from_bytes(_digest("scenes", name), "big") % HELD_OUT_ONE_IN == 0


def _digest(use: str, text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8, person=use.encode()).digest()


@lru_cache(maxsize=8)
def all_scenes(level: int, split: str | None = None) -> tuple[Scene, ...]:
    """Every scene of a level in a fixed order; `split` "train" or "held_out" keeps one side, None both.
    Level 1 has 576 scenes, level 2 has 43,008. Raises ValueError for another level or split."""
    if split in ("train", "held_out"):
        return tuple(s for s in all_scenes(level) if is_held_out(s) == (split == "held_out"))
    if split is not None:
        raise ValueError(f'unknown split {split!r}: choose "train", "held_out" or None')
    things = [Thing(*words) for words in itertools.product(SIZES, COLOURS, SHAPES)]
    if level == 1:
        return tuple(Scene((t,), p, b) for t, p, b in itertools.product(things, PLACES, BACKGROUNDS))
    if level == 2:
        pairs = [(a, b) for a, b in itertools.product(things, things) if a.colour != b.colour]
        return tuple(Scene(p, r, b) for p, r, b in itertools.product(pairs, RELATIONS, BACKGROUNDS))
    raise ValueError(f"scenes have no level {level!r}: choose from {LEVELS}")


def sample_scene(rng: np.random.Generator, level: int, split: str = "train") -> Scene:
    """One scene of a split, every one equally likely."""
    scenes = all_scenes(level, split)
    return scenes[int(rng.integers(len(scenes)))]


@dataclass(frozen=True)
class SceneCheck:
    """What a picture shows beside what its caption says. `colour_match`: the background and every object have the
    caption's colours; `caption_match`: colours, shapes, sizes and places or relation are all right and nothing
    else is in the picture. `seen`: the scene read from the pixels, None if they show none; `why` it fails."""

    colour_match: bool
    caption_match: bool
    seen: Scene | None
    why: str = ""


def check(image: np.ndarray, caption: str) -> SceneCheck:
    """Whether an image shows its caption, from the pixels alone. `image`: (S, S, 3), uint8 or float in [0, 1].
    Raises ValueError for another shape or a caption that is no scene's."""
    from .scene_reader import read_picture

    wanted = parse_caption(caption)
    seen, colours = read_picture(image, wanted.level)
    wanted_colours = (wanted.background, *sorted(t.colour for t in wanted.things))
    colour_match = colours == wanted_colours
    if not colour_match:
        return SceneCheck(False, False, seen, f"colours: seen {colours}, the caption says {wanted_colours}")
    if seen is None:
        return SceneCheck(True, False, None, "the right colours, but no clear shapes or something else beside them")
    if seen in (wanted, wanted.mirrored()):
        return SceneCheck(True, True, wanted)
    return SceneCheck(True, False, seen, f"seen: {seen.caption}")


class SceneSource:
    """The training scenes of one level as a Source. There are few of them, so that a shard has every one, several
    times at level 1, mixed by a fixed hash; else leases of a shard would be over in a second."""

    SHARDS = 64
    SHARD = 4096  # scenes in a shard, about; each as often as the others

    def __init__(self, level: int, image_size: int, range_length: int = 512) -> None:
        self._image_size, self._range_length = image_size, range_length
        self._scenes = sorted(all_scenes(level, "train"), key=lambda scene: _digest("shard", scene.caption))
        self._length = -(-self.SHARD // len(self._scenes)) * len(self._scenes)
        self.shards = [f"scenes-{level}/{number}" for number in range(self.SHARDS)]
        self.catalogue = f"scenes-{level}"
        self.counts: Counter[str] = Counter()

    def ranges(self, shard: str, give_up_at: float) -> list[int]:
        return [*range(0, self._length, self._range_length), self._length]

    def read(self, shard: str, start: int, stop: int | None, give_up_at: float) -> Iterator[Raw]:
        """The scenes of one shard from index `start` up to `stop`."""
        for index in range(start, self._length if stop is None else min(stop, self._length)):
            again, place = divmod(index, len(self._scenes))
            scene = self._scenes[int(_order(shard, again, len(self._scenes))[place])]
            yield Raw(index, f"{shard}#{index}", scene, 0)

    def use(self, raw: Raw) -> Record:
        caption = raw.data.caption
        return Record(caption, raw.data.render(self._image_size), picture=caption)


@lru_cache(maxsize=32)
def _order(shard: str, again: int, length: int) -> np.ndarray:
    """The scenes' places in one round of a shard; RandomState's stream is frozen."""
    seed = np.frombuffer(_digest("order", f"{shard}/{again}"), "<u4")
    return np.random.RandomState(seed).permutation(length)
