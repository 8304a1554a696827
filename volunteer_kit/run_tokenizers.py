"""A run's two tokenizers: built from their names, checked against the model's sizes, identified by their contents."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from volunteer_kit import packages
from volunteer_kit.data.tokenizer import load_tokenizer
from volunteer_kit.model.image_tokenizer_config import (
    PUBLISHED,
    WEIGHTS,
    ImageTokenizerError,
    VqganConfig,
    image_tokenizer_config,
    image_tokenizer_file,
)
from volunteer_kit.run_reader import Mistake, RunError, RunText

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from volunteer_kit.data.tokenizer import Tokenizer
    from volunteer_kit.model.image_tokenizer import ImageTokenizer
    from volunteer_kit.model.image_tokenizer_config import PatchVQConfig
    from volunteer_kit.runs import RunConfig


class Tokenizers(NamedTuple):
    """What turns captions and images into the model's integers."""

    text: Tokenizer
    image: ImageTokenizer


def require_tokenizers(config: RunConfig) -> None:
    """Raises RunError, with the way to get it, when this machine lacks the run's image tokenizer; MissingDependency
    when it lacks the package that the tokenizer is built of. Loads nothing."""
    try:
        image_tokenizer_file(config.image_tokenizer)
    except ImageTokenizerError as error:
        raise RunError(f"The run {config.run_id!r} cannot begin here. {error}") from None
    if isinstance(image_tokenizer_config(config.image_tokenizer), VqganConfig):
        packages.require_upstream()  # its layers are taming-transformers'


def build_tokenizers(config: RunConfig) -> Tokenizers:
    """The run's text and image tokenizers. Raises RunError if they are not here or do not fit the model, OSError."""
    from volunteer_kit.model.image_tokenizer import load_image_tokenizer

    require_tokenizers(config)
    text, image = load_tokenizer(config.text_tokenizer), load_image_tokenizer(config.image_tokenizer)
    mistakes = _misfits(config, text, image.config)
    if mistakes:
        raise RunText(f"run {config.run_id!r}", {}).error(mistakes)
    return Tokenizers(text, image)


class StreamTokenizers(NamedTuple):
    """What the stream makes samples with. A run that reads codes gets by without the image tokenizer's weights."""

    text: Tokenizer
    encode_images: Callable[[Tensor], Tensor]  # float (B, 3, S, S) in [0, 1] -> integers (B, N)
    image_size: int  # S


def build_stream_tokenizers(config: RunConfig, device: torch.device | str = "cpu") -> StreamTokenizers:
    """As build_tokenizers, with images encoded on `device`; where samples may come as codes, the image tokenizer is
    loaded with the first image."""
    load = functools.cache(lambda: build_tokenizers(config).image.to(device))
    if needs_images(config):
        load()
    text, about = load_tokenizer(config.text_tokenizer), image_tokenizer_config(config.image_tokenizer)
    if mistakes := _misfits(config, text, about):
        raise RunText(f"run {config.run_id!r}", {}).error(mistakes)
    return StreamTokenizers(text, lambda images: load().encode(images.to(device)), about.image_size)


def needs_images(config: RunConfig) -> bool:
    """Whether training certainly encodes images on this machine."""
    return config.data.kind in ("scenes", "shards")


def tokenizer_mistakes(config: RunConfig) -> list[Mistake]:
    """What can be told about the tokenizers without a network: of those that ship with the kit."""
    try:
        image = image_tokenizer_config(config.image_tokenizer)
    except (OSError, ValueError) as error:
        return [Mistake(("image_tokenizer",), str(error).rstrip("."), "name a tokenizer that exists")]
    try:
        text = None if config.text_tokenizer.startswith("hub:") else load_tokenizer(config.text_tokenizer)
    except (OSError, ValueError) as error:
        return [Mistake(("text_tokenizer",), str(error).rstrip("."), "name a tokenizer that exists")]
    return _misfits(config, text, image)


def _misfits(config: RunConfig, text: Tokenizer | None, image: PatchVQConfig | VqganConfig) -> list[Mistake]:
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
    for key, theirs in (("num_image_tokens", image.num_codes), ("image_fmap_size", image.fmap)):
        ours = getattr(model, key)
        if ours != theirs:
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
    """What an image tokenizer's name stands for: the hash of its weights, since paths differ between machines.

    A published one stands for itself: peers that read ready-made codes need not have it.
    """
    return name if name in PUBLISHED else _content(name, WEIGHTS / f"{name}.safetensors", Path(name))


def text_identity(name: str) -> str:
    """As image_identity, of a text tokenizer."""
    path = name.removeprefix("file:")
    return _content(name, Path(path) if path != name else Path(__file__).parent / "data" / f"{name}.json")


def _content(name: str, *files: Path) -> str:
    for path in files:
        if path.is_file():
            about = path.stat()
            return _hash(path, about.st_size, about.st_mtime_ns)
    return name


@functools.lru_cache  # a run's fingerprint is asked for often, and weights may have hundreds of MB
def _hash(path: Path, size: int, changed: int) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
