"""A published VQGAN checkpoint -> one safetensors file that the kit uses as an image tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor

from volunteer_kit.convert.files import ConvertError, Source, not_written, refuse_to_overwrite
from volunteer_kit.model.image_tokenizer import PUBLISHED, published_file, save_vqgan
from volunteer_kit.model.vqgan import PARTS, Vqgan, VqganConfig, config_of_weights
from volunteer_kit.run_reader import read_small, read_yaml

_OTHERS = "1. The published one that the kit reads: volunteer-kit convert last.ckpt vqgan-f8-8192"


def is_vqgan(weights: Mapping[str, Any]) -> bool:
    """Whether these are a VQGAN's weights, Gumbel or not."""
    return "encoder.conv_in.weight" in weights and any(name.startswith("quantize.") for name in weights)


def convert_vqgan(
    source: Source, weights: Mapping[str, Tensor], target: str, config: Path | None, say: Callable[[str], None]
) -> Path:
    """Write `target`, a path or a published tokenizer's name. Raises ConvertError."""
    path = published_file(target) if target in PUBLISHED else Path(target)
    refuse_to_overwrite(path)
    tokenizer = build_vqgan(weights, str(source.path), config)
    if tokenizer.config != PUBLISHED.get(target, tokenizer.config):
        raise ConvertError(
            f"{source.path} is not the published {target}: {_sizes(tokenizer.config)} instead of "
            f"{_sizes(PUBLISHED[target])}, or other layers.\n"
            f"1. Give it a path of its own: volunteer-kit convert {source.path} my-vqgan.safetensors\n"
            "   and name that path in your run file: image_tokenizer: my-vqgan.safetensors"
        )
    left_out = sum(not name.startswith(PARTS) for name in weights)
    write_vqgan(path, tokenizer)
    say(f"Wrote {path} ({path.stat().st_size / 1e6:,.1f} MB): {_sizes(tokenizer.config)}.")
    if left_out:
        say(f"Left out {left_out} tensors that served its training only.")
    say(f"In a run file: image_tokenizer: {target}")
    return path


def build_vqgan(weights: Mapping[str, Tensor], where: str, config: Path | None = None) -> Vqgan:
    """Weights with taming's names -> Vqgan in fp32. Raises ConvertError in words."""
    if "quantize.embedding.weight" in weights:
        raise ConvertError(
            f"{where} is a VQGAN that takes the nearest of its codes; the kit reads those with Gumbel quantization.\n"
            f"{_OTHERS}"
        )
    own = {name: tensor.float() for name, tensor in weights.items() if name.startswith(PARTS)}
    try:
        shape = read_config(config) if config else config_of_weights(own)
        with torch.device("meta"):
            tokenizer = Vqgan(shape)
        tokenizer.load_state_dict(own, assign=True)
        if not all(tensor.isfinite().all() for tensor in own.values()):
            raise ValueError("its weights are not finite")
    except (ValidationError, ValueError, RuntimeError, IndexError, KeyError) as error:
        if isinstance(error, ConvertError):
            raise
        raise ConvertError(
            f"{where} is no VQGAN with Gumbel quantization in taming-transformers' layout ({_reason(error)}).\n"
            f"{_OTHERS}\n2. If it has sizes of its own, give its model.yaml: --config model.yaml"
        ) from None
    return tokenizer.eval().requires_grad_(False)


def write_vqgan(path: Path, tokenizer: Vqgan) -> None:
    """As save_vqgan, in a folder that is made if need be. Raises ConvertError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_vqgan(path, tokenizer)
    except (OSError, SafetensorError) as error:
        raise not_written(path, error) from error


def read_config(path: Path) -> VqganConfig:
    """taming's model.yaml -> VqganConfig. Raises RunError if it is no YAML, ConvertError if it is another."""
    values = read_yaml(read_small(path), str(path)).values
    try:
        params = values["model"]["params"]
        layers = {key: value for key, value in params["ddconfig"].items() if key != "dropout"}
        return VqganConfig(embed_dim=params["embed_dim"], n_embed=params["n_embed"], **layers)
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        raise ConvertError(
            f"{path} is not the model.yaml of such a VQGAN ({_reason(error)}).\n"
            "1. It needs model: params: with embed_dim, n_embed and ddconfig, as taming-transformers writes it.\n"
            "2. Leave --config out: for images of 256x256 the sizes are read from the weights."
        ) from None


def _sizes(config: VqganConfig) -> str:
    side, fmap = config.image_size, config.fmap
    return f"images of {side}x{side} as {fmap}x{fmap} codes of {config.num_codes}"


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": Value error, ")
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    lines = [line.strip() for line in str(error).splitlines()]
    return (lines[1] if len(lines) > 1 else lines[0])[:200]
