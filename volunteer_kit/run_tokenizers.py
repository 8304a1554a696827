"""A run's two tokenizers: built from their names, checked against the model's sizes, identified by their contents."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from volunteer_kit.data.tokenizer import load_tokenizer
from volunteer_kit.model.image_tokenizer import WEIGHTS, load_image_tokenizer
from volunteer_kit.run_reader import Mistake, RunError, RunText

if TYPE_CHECKING:
    from volunteer_kit.data.tokenizer import Tokenizer
    from volunteer_kit.model.image_tokenizer import PatchVQ
    from volunteer_kit.runs import RunConfig


class Tokenizers(NamedTuple):
    """What turns captions and images into the model's integers."""

    text: Tokenizer
    image: PatchVQ


# Tokenizers that a run file may name and this version cannot build: codes, codes a side, what to do meanwhile
NOT_YET = {
    "vqgan-f8-8192": (
        8192,
        32,
        "the original's VQGAN (f8, 8,192 codes) is not in this version: its published checkpoint is a "
        "pickle, which this kit opens through a converter only, and that is not there yet. Until then, use "
        "the run demo or emoji",
    ),
}


def require_tokenizers(config: RunConfig) -> None:
    """Raises RunError when the run names a tokenizer that this version cannot build; loads nothing."""
    if config.image_tokenizer in NOT_YET:
        raise RunError(f"The image tokenizer of run {config.run_id!r}: {NOT_YET[config.image_tokenizer][2]}.")


def build_tokenizers(config: RunConfig) -> Tokenizers:
    """The run's text and image tokenizers. Raises RunError if they do not fit the model, OSError."""
    require_tokenizers(config)
    text, image = load_tokenizer(config.text_tokenizer), _image_tokenizer(config)
    mistakes = _misfits(config, text, image)
    if mistakes:
        raise RunText(f"run {config.run_id!r}", {}).error(mistakes)
    return Tokenizers(text, image)


def tokenizer_mistakes(config: RunConfig) -> list[Mistake]:
    """What can be told about the tokenizers without a network: of those that ship with the kit."""
    try:
        image = None if _is_remote(config.image_tokenizer) else _image_tokenizer(config)
    except (OSError, ValueError) as error:
        return [Mistake(("image_tokenizer",), str(error).rstrip("."), "name a tokenizer that exists")]
    try:
        text = None if _is_remote(config.text_tokenizer) else load_tokenizer(config.text_tokenizer)
    except (OSError, ValueError) as error:
        return [Mistake(("text_tokenizer",), str(error).rstrip("."), "name a tokenizer that exists")]
    return _misfits(config, text, image)


def _image_tokenizer(config: RunConfig) -> PatchVQ:
    with torch.random.fork_rng(devices=[]):  # building it draws random weights before it reads the real ones
        return load_image_tokenizer(config.image_tokenizer)


def _is_remote(name: str) -> bool:
    return name.startswith("hub:") or name in NOT_YET


def _misfits(config: RunConfig, text: Tokenizer | None, image: PatchVQ | None) -> list[Mistake]:
    """Where the model's sizes and the tokenizers' disagree."""
    mistakes = []
    model = config.model
    if text is not None and text.vocab_size > model.num_text_tokens:
        mistakes.append(
            Mistake(
                ("model", "num_text_tokens"),
                f"the text tokenizer {config.text_tokenizer!r} has {text.vocab_size} tokens and the model "
                f"has room for {model.num_text_tokens}",
                f"set num_text_tokens: {text.vocab_size} in section model",
            )
        )
    codes, side = NOT_YET[config.image_tokenizer][:2] if config.image_tokenizer in NOT_YET else (None, None)
    if image is not None:
        codes, side = image.config.num_codes, image.config.fmap
    for key, theirs in (("num_image_tokens", codes), ("image_fmap_size", side)):
        ours = getattr(model, key)
        if theirs is not None and ours != theirs:
            unit = "codes" if key == "num_image_tokens" else "codes a side"
            mistakes.append(
                Mistake(
                    ("model", key),
                    f"the image tokenizer {config.image_tokenizer!r} makes {theirs} {unit} and the model "
                    f"expects {ours}",
                    f"set {key}: {theirs} in section model, or name another image_tokenizer",
                )
            )
    return mistakes


def image_identity(name: str) -> str:
    """What an image tokenizer's name stands for: the hash of its weights, since paths differ between machines."""
    return _content(name, WEIGHTS / f"{name}.safetensors", Path(name))


def text_identity(name: str) -> str:
    """As image_identity, of a text tokenizer."""
    path = name.removeprefix("file:")
    return _content(name, Path(path) if path != name else Path(__file__).parent / "data" / f"{name}.json")


def _content(name: str, *files: Path) -> str:
    for path in files:
        if path.is_file():
            return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    return name
