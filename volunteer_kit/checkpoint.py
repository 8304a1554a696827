"""Checkpoints: a folder epoch-000123/ with model.safetensors and meta.json, whole or not there at all.

A checkpoint is written beside its place, flushed to disk and renamed, so a crash or a full disk leaves the one before
it untouched (storage/epoch_folders.py). Its tensors are covered by a SHA-256 in meta.json and are checked on load.
Nothing is unpickled. One folder has one writer; others may read it at any time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from volunteer_kit.storage import flush, part_folder
from volunteer_kit.storage.epoch_folders import name_of, newest_first, put_in_place, tidy

TENSORS, META = "model.safetensors", "meta.json"
OPTIMIZER = "optimizer/"  # names of tensors that belong to the optimizer begin with this
FORMAT = 1
META_LIMIT = 4 * 2**20  # bytes; a longer meta.json is not ours
HEADROOM = 2**20  # bytes a disk needs beyond the tensors

logger = logging.getLogger(__name__)


class CheckpointError(OSError):
    """A checkpoint could not be written, or is not what it says it is. The message says what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: named CPU tensors and its meta.json."""

    path: Path
    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any]
    skipped: tuple[str, ...] = ()  # newer checkpoints that latest_checkpoint had to pass over, and why

    @property
    def epoch(self) -> int:
        return self.meta["epoch"]

    @property
    def model(self) -> dict[str, torch.Tensor]:
        """Everything but the optimizer's tensors."""
        return {name: tensor for name, tensor in self.tensors.items() if not name.startswith(OPTIMIZER)}

    @property
    def optimizer(self) -> dict[str, torch.Tensor]:
        """The optimizer's tensors, their prefix taken off."""
        part = {name: tensor for name, tensor in self.tensors.items() if name.startswith(OPTIMIZER)}
        return {name.removeprefix(OPTIMIZER): tensor for name, tensor in part.items()}


class _Meta(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    format: int = Field(ge=1, le=FORMAT)
    epoch: int = Field(ge=0, lt=10**12)
    run_id: str = ""
    fingerprint: str = ""
    kit_version: str
    saved_at: float  # s since the Unix epoch
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")  # of model.safetensors
    bytes: int = Field(ge=0)  # its size
    aliases: dict[str, str] = {}  # a tied tensor's other name -> the name it is stored under


def save_checkpoint(folder: str | Path, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> Path:
    """Write folder/epoch-000123 and return its path; the same epoch again replaces the earlier one.

    :param tensors: by name, on any device; tied tensors are stored once. Optimizer tensors begin with "optimizer/".
    :param meta: must hold "epoch"; "run_id" and "fingerprint" belong there; any other JSON field is kept as it is.
    Raises CheckpointError when the disk does not take it; what was saved before is then still there.
    """
    folder, epoch = Path(folder), meta.get("epoch")
    if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
        raise ValueError(f"meta needs an 'epoch' that is a whole number >= 0, not {epoch!r}")
    unique, aliases = _without_ties(tensors)
    needed = sum(tensor.numel() * tensor.element_size() for tensor in unique.values())
    path = folder / name_of(epoch)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clear_leftovers(folder)
        if shutil.disk_usage(folder).free < needed + HEADROOM:
            raise OSError("the disk is full")
        with part_folder(path) as part:
            save_file(unique, part / TENSORS, metadata={"format": "pt"})
            flush(part / TENSORS)
            own = {
                "format": FORMAT,
                "kit_version": _kit_version(),
                "saved_at": time.time(),
                "sha256": _sha256(part / TENSORS),
                "bytes": (part / TENSORS).stat().st_size,
                "aliases": aliases,
            }
            _write_meta(part / META, _Meta.model_validate({**meta, **own}).model_dump())
            flush(part)
            put_in_place(part, path)
    except (OSError, SafetensorError) as cause:
        raise CheckpointError(_why_not_saved(path, needed, cause)) from cause
    return path


def load_checkpoint(
    path: str | Path,
    verify: bool = True,
    *,
    fingerprint: str | None = None,
    shapes: Mapping[str, Iterable[int]] | None = None,
    finite: bool = False,
) -> Checkpoint:
    """Read one checkpoint folder and check it.

    :param verify: compare the tensor file with its SHA-256 (about a second a gigabyte).
    :param fingerprint: the run it has to be of; None: any.
    :param shapes: names and shapes that have to be among the tensors, such as a model's.
    :param finite: refuse infinite values and NaN.
    Raises CheckpointError that names the folder and what is wrong with it.
    """
    path = Path(path)
    meta = _read_meta(path)
    file = path / TENSORS
    try:
        _require_size(path, meta)
        if verify and _sha256(file) != meta.sha256:
            raise _bad(path, f"the contents of {TENSORS} are not what was saved (SHA-256 differs)")
        with safe_open(file, framework="pt") as opened:  # its tensors are maps of the file: cut off, it would kill us
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}
    except CheckpointError:
        raise
    except (OSError, SafetensorError) as cause:
        raise _bad(path, f"{TENSORS} cannot be read: {cause}") from cause
    for name, stored in meta.aliases.items():
        if stored not in tensors:
            raise _bad(path, f"{META} ties {name} to {stored}, which is not there")
        tensors[name] = tensors[stored]
    if fingerprint is not None and meta.fingerprint != fingerprint:
        raise CheckpointError(
            f"The checkpoint {path} is of another run or of other settings: its fingerprint is "
            f"{meta.fingerprint or 'missing'}, this run's {fingerprint}.\n"
            "  1. Use a checkpoint of this run.\n  2. Or use another checkpoint folder to begin anew."
        )
    if shapes is not None:
        _check_shapes(path, tensors, shapes)
    if finite and not is_finite(tensors):
        raise _bad(path, "it holds infinite values or NaN")
    return Checkpoint(path, tensors, meta.model_dump())


def latest_checkpoint(
    folder: str | Path,
    *,
    fingerprint: str | None = None,
    shapes: Mapping[str, Iterable[int]] | None = None,
    finite: bool = False,
) -> Checkpoint | None:
    """The newest good checkpoint in a folder, loaded and verified; None if the folder holds no checkpoint.

    Bad ones are passed over, logged, and listed in `.skipped`. Raises CheckpointError if all of them are bad.
    """
    skipped: list[str] = []
    for path in newest_first(Path(folder)):
        try:
            found = load_checkpoint(path, fingerprint=fingerprint, shapes=shapes, finite=finite)
        except CheckpointError as error:
            skipped.append(str(error).partition("\n")[0])
            logger.warning("Passing over a checkpoint: %s", skipped[-1])
            continue
        return replace(found, skipped=tuple(skipped))
    if not skipped:
        return None
    raise CheckpointError(
        f"No good checkpoint in {folder}:\n" + "".join(f"  - {reason}\n" for reason in skipped)
        + "What to do:\n  1. Copy a good checkpoint there from another machine or backup.\n"
        f"  2. Or begin without it, and keep the old folder: mv {folder} {folder}.bad"
    )  # fmt: skip


def keep_last(folder: str | Path, n: int) -> list[Path]:
    """Delete all but the newest n usable checkpoints; returns what was deleted. A broken one does not count as kept."""
    if n < 1:
        raise ValueError("keep at least one checkpoint")
    kept, deleted = 0, []
    for path in newest_first(Path(folder)):
        if kept < n:
            kept += _looks_whole(path)
            continue
        shutil.rmtree(path, ignore_errors=True)
        deleted.append(path)
    return deleted


def read_meta(path: str | Path) -> dict[str, Any]:
    """meta.json of a checkpoint's folder, whose tensors are there in their whole length. Raises CheckpointError."""
    path = Path(path)
    meta = _read_meta(path)
    _require_size(path, meta)
    return meta.model_dump()


def clear_leftovers(folder: str | Path) -> None:
    """What a killed writer left in a folder of checkpoints: what it was writing goes, what it had moved aside comes
    back. Raises OSError."""
    tidy(Path(folder), _looks_whole)


def is_finite(tensors: Mapping[str, torch.Tensor] | Iterable[torch.Tensor]) -> bool:
    """Whether no floating-point tensor holds an infinity or NaN. Takes no extra memory."""
    for tensor in tensors.values() if isinstance(tensors, Mapping) else tensors:
        if tensor.numel() and tensor.dtype.is_floating_point:
            low, high = torch.aminmax(tensor.detach())  # NaN goes through both
            if not (torch.isfinite(low) and torch.isfinite(high)):
                return False
    return True


def _without_ties(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each piece of memory once, contiguous, plus other name -> stored name."""
    unique: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first_name: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and same in first_name:
            aliases[name] = first_name[same]
            continue
        first_name[same] = name
        storage = tensor.untyped_storage().data_ptr()
        overlaps, _ = storage in storages, storages.add(storage)
        unique[name] = (tensor.clone() if overlaps else tensor).contiguous().cpu()
    return unique, aliases


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _write_meta(path: Path, meta: dict[str, Any]) -> None:
    text = json.dumps(meta, indent=1, allow_nan=False, ensure_ascii=False)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _read_meta(path: Path) -> _Meta:
    file = path / META
    try:
        if file.stat().st_size > META_LIMIT:
            raise _bad(path, f"{META} is far too long")
        return _Meta.model_validate_json(file.read_bytes())
    except FileNotFoundError as cause:
        raise _bad(path, f"{META} is missing" if path.is_dir() else "there is no such folder") from cause
    except ValidationError as cause:
        first = cause.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _bad(path, f"{META} is damaged ({where + ': ' if where else ''}{first['msg']})") from cause
    except CheckpointError:
        raise
    except OSError as cause:
        raise _bad(path, f"{META} cannot be read: {cause.strerror or cause}") from cause


def _require_size(path: Path, meta: _Meta) -> None:
    """Raises CheckpointError."""
    try:
        size = (path / TENSORS).stat().st_size
    except OSError as cause:
        raise _bad(path, f"{TENSORS} cannot be read: {cause.strerror or cause}") from cause
    if size != meta.bytes:
        raise _bad(path, f"{TENSORS} has {size:,} bytes, {META} says {meta.bytes:,}: cut off")


def _looks_whole(path: Path) -> bool:
    """Complete as far as its sizes tell, without reading it."""
    try:
        read_meta(path)
    except OSError:
        return False
    return True


def _check_shapes(path: Path, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, Iterable[int]]) -> None:
    wrong = []
    for name, shape in shapes.items():
        found = tuple(tensors[name].shape) if name in tensors else "missing"
        if found != tuple(shape):
            wrong.append(f"{name} is {found}, expected {tuple(shape)}")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise _bad(path, f"it is of another model: {'; '.join(wrong[:3])}{more}")


def _bad(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {path} cannot be used: {why}.\n"
        "  1. Use an older one: the folders beside it.\n"
        f"  2. If it came from a download or a copy, copy it again, with {META} and {TENSORS}."
    )


def _why_not_saved(path: Path, needed: int, cause: BaseException) -> str:
    folder = path.parent
    try:
        free = f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free"
    except OSError:
        free = "its free space is unknown"
    reason = getattr(cause, "strerror", None) or str(cause)
    return (
        f"The checkpoint {path} could not be saved: {reason} (it takes {needed / 1e6:,.1f} MB, {free}). "
        "Earlier checkpoints are kept, and training can go on.\n"
        f"  1. Free some space: df -h {folder}\n"
        f"  2. Or choose a folder on another disk that you may write to."
    )


def _kit_version() -> str:
    try:
        return version("volunteer-kit")
    except PackageNotFoundError:
        return "not installed"
