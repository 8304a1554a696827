"""dalle-pytorch's hyperparameters <-> DalleConfig: the same model in two vocabularies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from torch import Tensor

from volunteer_kit.convert.files import ConvertError
from volunteer_kit.model.dalle import DalleConfig

VERSION = "1.6.6"
# What the weights do not depend on: a run may choose another value and train on
FREE = ("loss_img_weight",)
_LAYERS = ("attn_types", "shared_attn_ids", "shared_ff_ids", "last_layer_conv_like")


class Hparams(BaseModel):
    """The arguments of dalle-pytorch's DALLE, with its defaults."""

    model_config = ConfigDict(extra="forbid")

    dim: int = Field(gt=0)
    depth: int = Field(gt=0, le=10_000)
    num_text_tokens: int = 10_000
    text_seq_len: int = 256
    heads: int = 8
    dim_head: int = 64
    reversible: bool = False
    attn_dropout: float = 0.0
    ff_dropout: float = 0.0
    sparse_attn: Any = False
    attn_types: tuple[str, ...] | None = None
    loss_img_weight: float = 7
    stable: bool = False
    sandwich_norm: bool = False
    shift_tokens: bool = True
    rotary_emb: bool = True
    shared_attn_ids: tuple[int, ...] | None = None
    shared_ff_ids: tuple[int, ...] | None = None
    share_input_output_emb: bool = False
    optimize_for_inference: bool = False  # the same weights and results, computed otherwise

    @field_validator("attn_types", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


def config_of(hparams: Mapping[str, Any], weights: Mapping[str, Tensor]) -> DalleConfig:
    """dalle-pytorch's hyperparameters -> DalleConfig; what its image tokenizer decides is read from the weights.

    Raises ConvertError for a model that the kit does not have.
    """
    try:
        theirs = Hparams.model_validate({key: value for key, value in hparams.items() if key != "vae"})
        _refuse_unknown_layers(theirs)
        positions = theirs.text_seq_len + 1
        if theirs.rotary_emb:
            fmap = math.isqrt(max(0, weights["transformer.pos_emb"].shape[-2] - positions))
        else:
            fmap = weights["image_pos_emb.weights.0"].shape[1]
        codes = weights["to_logits.1.bias"].shape[0] - theirs.num_text_tokens - theirs.text_seq_len
        same = set(Hparams.model_fields) & set(DalleConfig.model_fields) - set(_LAYERS)
        return DalleConfig(
            **{name: getattr(theirs, name) for name in same},
            **_layers(theirs),
            image_fmap_size=fmap,
            num_image_tokens=codes,
            padding="dalle-pytorch",
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _unsupported(f"its hyperparameter {where!r}: {first['msg']}") from None
    except (KeyError, IndexError) as error:
        raise _unsupported(f"it has no weights {error.args[0]!r}") from None


def hparams_of(config: DalleConfig) -> dict[str, Any]:
    """DalleConfig -> the arguments of dalle-pytorch's DALLE. Raises ConvertError for what it cannot be told."""
    if config.ff_mult != 4:
        raise ConvertError(
            f"dalle-pytorch's DALLE always has feed-forward layers of 4 times dim, and this model has {config.ff_mult} "
            "(ff_mult), so no dalle-pytorch file can be made of it.\n1. Train a run with ff_mult: 4 in section model."
        )
    same = set(Hparams.model_fields) & set(DalleConfig.model_fields) - set(_LAYERS)
    return {
        **{name: getattr(config, name) for name in Hparams.model_fields if name in same},
        "attn_types": tuple(config.layer_kinds),
        "shared_attn_ids": tuple(config.layer_ids(config.shared_attn_ids)),
        "shared_ff_ids": tuple(config.layer_ids(config.shared_ff_ids)),
        "attn_dropout": 0.0,
        "ff_dropout": 0.0,
        "stable": False,
    }


def differences(theirs: DalleConfig, run: DalleConfig) -> list[str]:
    """Where two configs mean different models, in words; the free ones are not among them."""
    one, other = _meaning(theirs), _meaning(run)
    return [f"{key} is {_short(one[key])}, in the run {_short(other[key])}" for key in one if one[key] != other[key]]


def _meaning(config: DalleConfig) -> dict[str, Any]:
    plain = config.model_dump(exclude={*_LAYERS, *FREE})
    return {
        **plain,
        "attn_types": list(config.layer_kinds),
        "shared_attn_ids": _renumbered(config.layer_ids(config.shared_attn_ids)),
        "shared_ff_ids": _renumbered(config.layer_ids(config.shared_ff_ids)),
    }


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else f"{text[:56]} ..."


def _refuse_unknown_layers(theirs: Hparams) -> None:
    for name, reason in (
        ("stable", "divides activations by their maximum"),
        ("sandwich_norm", "puts a second norm behind each layer"),
        ("sparse_attn", "is attention by a CUDA kernel of DeepSpeed"),
    ):
        if getattr(theirs, name):
            raise _unsupported(f"it was trained with {name}, which {reason}")
    if unknown := sorted({*(theirs.attn_types or ())} - {"full", "axial_row", "axial_col", "conv_like"}):
        raise _unsupported(f"it has layers of attention type {unknown[0]!r}")


def _unsupported(why: str) -> ConvertError:
    return ConvertError(
        f"This dalle-pytorch model cannot become one of the kit: {why}.\n"
        f"1. Check that it was saved by dalle-pytorch {VERSION}; older versions name and order layers otherwise.\n"
        "2. Use it with dalle-pytorch itself."
    )


def _layers(theirs: Hparams) -> dict[str, Any]:
    """The kinds and the sharing of layers, in the shortest of the ways that a run file can say them."""
    every = range(theirs.depth)
    kinds, attn, ff = (
        [values[layer % len(values)] for layer in every]
        for values in (theirs.attn_types or ("full",), theirs.shared_attn_ids or every, theirs.shared_ff_ids or every)
    )
    attn, ff = _renumbered(attn), _renumbered(ff)
    ways = [_cycles(kinds, attn, ff)]
    if theirs.depth > 1 and kinds[-1] == "conv_like" and attn.count(attn[-1]) == ff.count(ff[-1]) == 1:
        ways.append({**_cycles(kinds[:-1], attn[:-1], ff[:-1]), "last_layer_conv_like": True})
    return min(ways, key=_length)


def _length(way: dict[str, Any]) -> int:
    return sum(len(value) for value in way.values() if isinstance(value, tuple)) + ("last_layer_conv_like" in way)


def _cycles(kinds: list, attn: list, ff: list) -> dict[str, Any]:
    alone = list(range(len(kinds)))
    return {
        "attn_types": _shortest_cycle(kinds),
        "shared_attn_ids": None if attn == alone else _shortest_cycle(attn),
        "shared_ff_ids": None if ff == alone else _shortest_cycle(ff),
    }


def _shortest_cycle(values: list) -> tuple:
    length = next(n for n in range(1, len(values) + 1) if all(v == values[i % n] for i, v in enumerate(values)))
    return tuple(values[:length])


def _renumbered(ids: Sequence[int]) -> list[int]:
    """Ids in the order of their first use, 0, 1, ...: what they are called does not matter."""
    first = {number: place for place, number in enumerate(dict.fromkeys(ids))}
    return [first[number] for number in ids]
