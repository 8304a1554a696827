"""How image tokenizers are found by name, and what they say of themselves; read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError, safe_open

from volunteer_kit.storage.places import kit_folder

WEIGHTS = Path(__file__).parent / "weights"
PAGE = "https://heibox.uni-heidelberg.de/d/2e5662443a6b4307b470/"  # taming-transformers' README links to it
DOWNLOAD = f"{PAGE}files/?p=%2Fckpts%2Flast.ckpt&dl=1"


class ImageTokenizerError(OSError):
    """Weights of an image tokenizer that cannot be used; the message says why and what to do."""


class PatchVQConfig(BaseModel):
    """The shape of a PatchVQ. A file of a stranger says it before its weights are looked at, so it is bounded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image_size: int = Field(32, gt=0, le=8192)  # pixels a side
    fmap: int = Field(8, gt=0, le=1024)  # codes a side
    num_codes: int = Field(128, gt=1, le=2**20)
    code_dim: int = Field(16, gt=0, le=2**16)
    hidden: int = Field(64, gt=0, le=2**16)
    encoder_blocks: int = Field(1, ge=0, le=64)
    # patches around its own that a code may look at, for each encoder block
    encoder_reach: int = Field(0, ge=0, le=1024)
    decoder_blocks: int = Field(2, ge=0, le=64)

    @property
    def patch(self) -> int:
        """Pixels a side that one code stands for."""
        return self.image_size // self.fmap

    @model_validator(mode="after")
    def _patches_fit(self) -> PatchVQConfig:
        if self.image_size % self.fmap:
            raise ValueError(f"{self.image_size} pixels do not divide into {self.fmap} patches; choose a divisor")
        return self


class VqganConfig(BaseModel):
    """The shape of a Vqgan, in taming's words; the defaults are those of the published f8 Gumbel model. A file of a
    stranger says it before its weights are looked at, so it is bounded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    resolution: int = Field(256, gt=0, le=8192)  # pixels a side
    ch: int = Field(128, gt=0, le=2**16)  # channels of the first level
    ch_mult: tuple[int, ...] = Field((1, 1, 2, 4), min_length=1, max_length=10)  # each level halves the side
    num_res_blocks: int = Field(2, gt=0, le=16)
    attn_resolutions: tuple[int, ...] = Field((32,), max_length=10)  # sides at which the levels attend
    z_channels: int = Field(256, gt=0, le=2**16)
    embed_dim: int = Field(256, gt=0, le=2**16)
    n_embed: int = Field(8192, gt=1, le=2**20)
    in_channels: Literal[3] = 3
    out_ch: Literal[3] = 3
    double_z: Literal[False] = False

    @property
    def image_size(self) -> int:
        """Pixels a side."""
        return self.resolution

    @property
    def patch(self) -> int:
        """Pixels a side that one code stands for."""
        return 2 ** (len(self.ch_mult) - 1)

    @property
    def fmap(self) -> int:
        """Codes a side."""
        return self.resolution // self.patch

    @property
    def num_codes(self) -> int:
        return self.n_embed

    @model_validator(mode="after")
    def _can_be_built(self) -> VqganConfig:
        if self.resolution % self.patch:
            raise ValueError(f"{self.resolution} pixels cannot be halved {len(self.ch_mult) - 1} times")
        if any(self.ch * mult % 32 for mult in self.ch_mult):
            raise ValueError(f"ch times ch_mult must be multiples of 32, the groups of a norm; ch is {self.ch}")
        if self.z_channels != self.embed_dim:
            raise ValueError(
                f"Gumbel quantization reads z_channels ({self.z_channels}) from a layer of embed_dim ({self.embed_dim})"
            )
        return self


# Published tokenizers, by the name that a run file gives. Each machine keeps its own copy, converted once
PUBLISHED = {"vqgan-f8-8192": VqganConfig()}
# Kinds of tokenizers, by the one field of a file's header
CONFIGS: dict[str, type[PatchVQConfig] | type[VqganConfig]] = {"patch_vq": PatchVQConfig, "vqgan": VqganConfig}


def image_tokenizer_config(name_or_path: str | Path) -> PatchVQConfig | VqganConfig:
    """Its sizes, without reading the weights; of a published one, without having them. Raises ImageTokenizerError."""
    if str(name_or_path) in PUBLISHED:
        return PUBLISHED[str(name_or_path)]
    path = image_tokenizer_file(name_or_path)
    try:
        with safe_open(path, framework="np") as file:
            return read_header(file)[1]
    except (SafetensorError, ValidationError, ValueError) as error:
        raise broken_tokenizer(path, error) from error


def read_header(file: safe_open) -> tuple[str, PatchVQConfig | VqganConfig]:
    """The kind of an open tokenizer file, a key of CONFIGS, and its sizes. Raises ValidationError, ValueError."""
    header = file.metadata() or {}
    kind = next((kind for kind in CONFIGS if kind in header), "patch_vq")
    return kind, CONFIGS[kind].model_validate(json.loads(header.get(kind, "null")))


def image_tokenizer_file(name_or_path: str | Path) -> Path:
    """Where an image tokenizer's weights lie. Raises ImageTokenizerError that says how to get missing ones."""
    name = str(name_or_path)
    if name in PUBLISHED and not published_file(name).is_file():
        raise ImageTokenizerError(
            f"The image tokenizer {name!r} is not on this machine (it would be {published_file(name)}).\n"
            f"1. Download the published checkpoint, last.ckpt (376 MB, a pickle), from {PAGE}\n"
            f"   curl -L -o last.ckpt '{DOWNLOAD}'\n"
            f"2. Convert it, once: volunteer-kit convert last.ckpt {name}\n"
            "3. Or use a run whose tokenizer ships with the kit: demo, emoji"
        )
    shipped = WEIGHTS / f"{name}.safetensors"
    path = published_file(name) if name in PUBLISHED else shipped if name in _shipped() else Path(name)
    if not path.is_file():
        raise ImageTokenizerError(f"There is no image tokenizer {name!r}. {_advice()}")
    return path


def published_file(name: str) -> Path:
    """Where a published tokenizer's converted weights are kept: $VOLUNTEER_KIT_HOME or ~/.cache/volunteer_kit."""
    return kit_folder() / f"{name}.safetensors"


def _shipped() -> list[str]:
    return sorted(file.stem for file in WEIGHTS.glob("*.safetensors"))


def _advice() -> str:
    known = ", ".join([*_shipped(), *PUBLISHED])
    return f"Use one of {known}, or train your own: volunteer-kit train-tokenizer --help"


def broken_tokenizer(path: Path, error: Exception) -> ImageTokenizerError:
    """The error for a file whose header or weights cannot be read."""
    reason = str(error).splitlines()[0]
    return ImageTokenizerError(f"{path} is no intact image tokenizer ({reason}). {_advice()}")
