"""Scenes: captions, the split, and whether the checker is right and strict."""

from __future__ import annotations

import io
import itertools
import random
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image, ImageFilter

from volunteer_kit.data.scenes import (
    BACKGROUNDS,
    COLOURS,
    LEVELS,
    PLACES,
    RELATIONS,
    SHAPES,
    SIZES,
    Scene,
    Thing,
    all_scenes,
    check,
    is_held_out,
    parse_caption,
    sample_scene,
)

HELD_OUT_SHA256 = "95f0352a01c118d0508cb1b2e4a65fcb386e2300bc39edb83b7ae1e5eb9a90be"
SOME = {1: all_scenes(1), 2: random.Random(0).sample(all_scenes(2), 300)}


def noise(image: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(int(image.sum()))
    return np.clip(image + rng.normal(0, 8, image.shape), 0, 255).round().astype(np.uint8)


def jpeg(image: np.ndarray) -> np.ndarray:
    data = io.BytesIO()
    Image.fromarray(image).save(data, "JPEG", quality=75)
    return np.asarray(Image.open(data).convert("RGB"))


def blur(image: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(0.8)))


def test_there_is_enough_to_learn():
    assert len(COLOURS) >= 8 and len(SHAPES) >= 4 and len(SIZES) >= 2 and len(PLACES) >= 3 and len(RELATIONS) >= 3
    assert (len(all_scenes(1)), len(all_scenes(2))) == (576, 43_008)


@pytest.mark.parametrize("level", LEVELS)
def test_captions_are_unique_and_parse_back(level):
    captions = [scene.caption for scene in all_scenes(level)]
    assert len(set(captions)) == len(captions)
    assert all(parse_caption(scene.caption) == scene for scene in SOME[level])
    assert parse_caption(f"  {captions[0].upper()}. ") == all_scenes(level)[0]


def test_the_captions_of_the_contract():
    one = Scene((Thing("large", "red", "circle"),), "left", "grey")
    assert one.caption == "a large red circle on the left of a grey background"
    two = Scene((Thing("large", "red", "circle"), Thing("small", "blue", "square")), "left", "grey")
    assert two.caption == "a large red circle left of a small blue square on a grey background"


@pytest.mark.parametrize(
    "caption",
    [
        "",
        "a cat",
        "a large red circle",
        "a huge red circle on the left of a grey background",
        "a large red circle on the left of a red background",
        "a large red circle left of a small red square on a grey background",
        "a large red circle above a small blue square on the left of a grey background",
    ],
)
def test_other_sentences_are_refused_in_words(caption):
    with pytest.raises(ValueError, match="not a scene|not the caption of a scene"):
        parse_caption(caption)


@pytest.mark.parametrize("level", LEVELS)
def test_the_split(level):
    held_out, train = all_scenes(level, "held_out"), all_scenes(level, "train")
    assert 0.08 < len(held_out) / len(all_scenes(level)) < 0.12
    assert set(held_out).isdisjoint(train) and len(held_out) + len(train) == len(all_scenes(level))
    words = {word for scene in all_scenes(level) for word in scene.caption.split()}
    assert {word for scene in train for word in scene.caption.split()} == words
    assert all(is_held_out(scene) == is_held_out(scene.mirrored()) for scene in SOME[level])


def test_no_held_out_picture_is_in_training():
    train = {scene.render().tobytes() for scene in all_scenes(1, "train")}
    assert not any(scene.render().tobytes() in train for scene in all_scenes(1, "held_out"))


def test_the_split_is_the_same_in_every_process_and_release():
    code = (
        "import hashlib; from volunteer_kit.data.scenes import all_scenes;"
        "captions = '|'.join(s.caption for level in (1, 2) for s in all_scenes(level, 'held_out'));"
        "print(hashlib.sha256(captions.encode()).hexdigest())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert runs == {HELD_OUT_SHA256}


def test_samples_come_from_their_split_and_repeat_with_the_seed():
    def draw(seed: int, split: str) -> list[Scene]:
        rng = np.random.default_rng(seed)
        return [sample_scene(rng, 1, split) for _ in range(50)]

    assert draw(1, "train") == draw(1, "train") != draw(2, "train")
    assert all(is_held_out(scene) for scene in draw(1, "held_out"))
    assert not any(is_held_out(scene) for scene in draw(1, "train"))
    with pytest.raises(ValueError, match="unknown split"):
        draw(1, "test")
    with pytest.raises(ValueError, match="no level 3"):
        all_scenes(3)


@pytest.mark.parametrize("size", [32, 64, 100])
def test_rendering(size):
    image = SOME[2][0].render(size)
    assert image.shape == (size, size, 3) and image.dtype == np.uint8
    assert np.array_equal(image, SOME[2][0].render(size))
    assert np.array_equal(SOME[2][0].render(size), SOME[2][0].mirrored().render(size))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("spoil", [None, noise, jpeg, blur], ids=["clean", "noise", "jpeg", "blur"])
def test_the_checker_is_right(level, spoil):
    """True scenes pass, and no scene passes as another, whatever has happened to its pixels. JPEG may cost a few, and
    a blurred shape need not count as drawn."""
    scenes = SOME[level]
    images = [scene.render() if spoil is None else spoil(scene.render()) for scene in scenes]
    right = [check(image, scene.caption) for image, scene in zip(images, scenes, strict=True)]
    at_least = {None: 1.0, noise: 0.98, jpeg: 0.95, blur: 0.0}[spoil]
    assert np.mean([result.caption_match for result in right]) >= at_least
    assert np.mean([result.colour_match for result in right]) >= 0.99
    others = scenes[len(scenes) // 3 :] + scenes[: len(scenes) // 3]
    wrong = [
        check(image, other.caption).caption_match
        for image, scene, other in zip(images, scenes, others, strict=True)
        if other not in (scene, scene.mirrored())
    ]
    assert not any(wrong)


@pytest.mark.parametrize("x, y", [(14, 14), (2, 26)], ids=["a hole in the shape", "a spot beside it"])
def test_a_picture_that_is_almost_right_fails(x, y):
    """One cell of the image tokenizer, 4x4 pixels, is wrong: the model drew something else there."""
    for scene in all_scenes(1):
        if scene.where == "centre" and scene.things[0].size == "large":
            image = scene.render()
            is_object = (image[y, x] != image[0, 0]).any()
            image[y : y + 4, x : x + 4] = image[0, 0] if is_object else COLOURS[scene.things[0].colour]
            result = check(image, scene.caption)
            assert result.colour_match and not result.caption_match, scene.caption


def test_a_shape_that_is_half_another_fails():
    """The lower half of a square under the upper half of a circle: no circle, though its pixels are mostly right."""
    for scene in all_scenes(1):
        if scene.things[0].size == "large" and scene.things[0].shape == "circle":
            square = Scene((Thing("large", scene.things[0].colour, "square"),), scene.where, scene.background)
            image = scene.render()
            image[16:] = square.render()[16:]
            for caption in (scene.caption, square.caption):
                result = check(image, caption)
                assert result.colour_match and not result.caption_match, caption


def variants(scene: Scene) -> list[tuple[str, Scene]]:
    """Every scene that differs from `scene` in one word, with the kind of that word."""
    found = []
    for n, thing in enumerate(scene.things):
        used = {other.colour for other in scene.things}
        changes = (
            [("size", Thing(size, thing.colour, thing.shape)) for size in SIZES]
            + [("colour", Thing(thing.size, colour, thing.shape)) for colour in COLOURS if colour not in used]
            + [("shape", Thing(thing.size, thing.colour, shape)) for shape in SHAPES]
        )
        for kind, changed in changes:
            things = (*scene.things[:n], changed, *scene.things[n + 1 :])
            found.append((kind, Scene(things, scene.where, scene.background)))
    where = PLACES if scene.level == 1 else RELATIONS
    found += [("where", Scene(scene.things, other, scene.background)) for other in where]
    found += [("background", Scene(scene.things, scene.where, other)) for other in BACKGROUNDS]
    return [(kind, other) for kind, other in found if other != scene]


@pytest.mark.parametrize("scene", [*SOME[1][::37], *SOME[2][:12]], ids=lambda scene: scene.caption.replace(" ", "_"))
def test_one_wrong_word_is_enough_to_fail(scene):
    image = scene.render()
    for kind, other in variants(scene):
        result = check(image, other.caption)
        assert not result.caption_match, other.caption
        assert result.colour_match == (kind not in ("colour", "background")), other.caption
        assert result.why


def test_both_names_of_a_picture_are_right():
    for scene in SOME[2][:20]:
        assert check(scene.render(), scene.mirrored().caption).caption_match


def test_something_else_in_the_picture_fails():
    one, two = SOME[1][0], SOME[2][0]
    assert not check(two.render(), one.caption).caption_match
    assert not check(one.render(), two.caption).caption_match
    grey = np.full((32, 32, 3), 125, np.uint8)
    rng = np.random.default_rng(0)
    for image in (grey, rng.integers(0, 256, (32, 32, 3), dtype=np.uint8), np.zeros((32, 32, 3), np.float32)):
        for scene in itertools.chain(SOME[1][::50], SOME[2][::50]):
            assert not check(image, scene.caption).caption_match


def test_a_third_object_fails():
    scene = parse_caption("a small red circle on the left of a grey background")
    image = scene.render().copy()
    image[12:20, 20:28] = COLOURS["blue"]
    assert not check(image, scene.caption).caption_match


def test_floats_and_other_sizes_are_checked_too():
    scene = SOME[1][5]
    assert check(scene.render().astype(np.float32) / 255, scene.caption).caption_match
    assert check(scene.render(64), scene.caption).caption_match
    with pytest.raises(ValueError, match="shape"):
        check(np.zeros((3, 32, 32)), scene.caption)
    assert not check(np.full((32, 32, 3), np.nan), scene.caption).caption_match
