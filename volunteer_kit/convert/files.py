"""The files that `convert` reads and writes. It is the one door for a pickle, and nothing in a pickle is ever run."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from volunteer_kit.storage import part_folder, put_in_place

# What Lightning's checkpoints name besides tensors: the callback whose state they keep, and its scores
_NAMED_BY_LIGHTNING = (
    "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint",
    "lightning.pytorch.callbacks.model_checkpoint.ModelCheckpoint",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.dtype",
)


class ConvertError(ValueError):
    """A file that cannot be converted; the message says why and what to do."""


class Source(NamedTuple):
    """A file that was read: its path, the SHA-256 of its bytes, and what it holds."""

    path: Path
    sha256: str
    content: Any


def read_checkpoint(path: Path, sha256: str) -> Source:
    """A pickle of torch.save (zip or legacy) or a safetensors file -> its content, tensors on the CPU.

    Only tensors and plain values are made of a pickle (torch.load with weights_only). Raises ConvertError.
    """
    try:
        if path.suffix == ".safetensors":
            return Source(path, sha256, load_file(path))
        with (
            torch.serialization.safe_globals([_stand_in(name) for name in _NAMED_BY_LIGHTNING]),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # about pickle protocols; what it cannot read it refuses
            return Source(path, sha256, torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # a damaged or hostile file may make the reader raise anything
        raise _not_read(path, error) from None


def sha256_of(path: Path) -> str:
    """Hash of a file's bytes. Raises ConvertError if there is no such file."""
    if not path.is_file():
        raise ConvertError(
            f"There is no file {path}.\n"
            "1. Give a file on this machine: the VQGAN's last.ckpt, or dalle-pytorch's dalle.pt. Download it first.\n"
            "2. Or give a folder of the kit's checkpoints, to make a dalle-pytorch file of it."
        )
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def write_pickle(path: Path, content: Mapping[str, Any]) -> None:
    """torch.save, whole or not at all. Raises ConvertError when the disk does not take it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part_folder(path) as part:
            torch.save(dict(content), part / path.name)
            put_in_place(part / path.name, path)
    except (OSError, RuntimeError) as error:
        raise not_written(path, error) from error


def refuse_to_overwrite(path: Path) -> None:
    """Raises ConvertError if something lies there already."""
    if path.exists():
        raise ConvertError(
            f"{path} is there already and is not overwritten.\n1. Give another target.\n2. Or remove it: rm -r {path}"
        )


def not_written(path: Path, error: Exception) -> ConvertError:
    """The message for a file that the disk did not take."""
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    return ConvertError(
        f"{path} could not be written: {reason}.\n"
        f"1. Look at the free space: df -h {path.parent}\n2. Or give a target in a folder that you may write to."
    )


def tensors_of(content: Any) -> dict[str, Tensor]:
    """A state_dict's entries. Raises ConvertError if they are no names with ordinary tensors."""
    if not isinstance(content, Mapping) or not content:
        raise ConvertError("its weights are no dictionary of tensors")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise ConvertError(f"its entry {name!r} is no ordinary tensor")
    return dict(content)


def _stand_in(full_name: str) -> type:
    """An empty class of that name: what a pickle builds of it is thrown away."""
    module, _, name = full_name.rpartition(".")
    ignore = {"__init__": lambda self, *args, **kwargs: None, "__setstate__": lambda self, state: None}
    return type(name, (), {"__module__": module, **ignore})


def _not_read(path: Path, error: Exception) -> ConvertError:
    wanted = re.search(r"GLOBAL (\S+)", str(error))
    if wanted is not None:
        return ConvertError(
            f"{path} was not opened: it is a pickle that wants to use {wanted[1]}. Weights need no such thing, and "
            "what a pickle uses can harm this machine. Nothing of it was run.\n"
            "1. Compare the SHA-256 above with the publisher's; if they differ, throw the file away.\n"
            "2. If you trust who made it, ask for the weights alone: torch.save(model.state_dict(), 'weights.pt')"
        )
    kind = "safetensors file" if isinstance(error, SafetensorError) else "file of torch.save"
    reason = (str(error) or type(error).__name__).splitlines()[0][:200]
    return ConvertError(
        f"{path} is no intact {kind} ({reason}).\n"
        "1. Compare its size and the SHA-256 above with the publisher's, and download it again: browsers and curl "
        "leave cut files behind.\n"
        "2. What can be converted: a VQGAN checkpoint, a dalle-pytorch checkpoint, a folder of the kit's checkpoints."
    )
