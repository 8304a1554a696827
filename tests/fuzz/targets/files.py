"""Files and pipes of this machine: damaged disks, other programs, and what came by download or copy."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator

import torch
from pydantic import ValidationError
from safetensors.torch import save

from tests.fuzz.forms import JSON, Framed, Text
from tests.fuzz.frozen_clock import NOW
from tests.fuzz.target import Registry
from tests.fuzz.targets.common import folder, run_keys
from volunteer_kit.auth.access_token import KeyFolder, KeysError
from volunteer_kit.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from volunteer_kit.convert.files import ConvertError, read_checkpoint, tensors_of
from volunteer_kit.convert.vqgan import build_vqgan, is_vqgan
from volunteer_kit.data.errors import DataError
from volunteer_kit.device.remembered import Remembered
from volunteer_kit.encode.folder import read_report
from volunteer_kit.home import Home
from volunteer_kit.journal.bounds import amount, fields, line, maybe, whole
from volunteer_kit.model.image_tokenizer import ImageTokenizerError, image_tokenizer_config, load_image_tokenizer
from volunteer_kit.model.vqgan import VqganConfig
from volunteer_kit.monitor.asked import answer_all
from volunteer_kit.monitor.kept import KeptStates
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.net.identity import ensure_identity
from volunteer_kit.training.protocol import WorkerSpec, dump_event, parse_command, parse_event

registry = Registry()
SMALL = {"a.weight": torch.ones(2, 3), "optimizer/a": torch.zeros(3)}


def _checkpoint() -> tuple[bytes, bytes]:
    path = save_checkpoint(folder() / "checkpoints", SMALL, {"epoch": 3, "run_id": "test", "numbers": [1.0]})
    return (path / "meta.json").read_bytes(), (path / "model.safetensors").read_bytes()


@registry.add(lambda: [_checkpoint()[0]], CheckpointError, form=JSON)
def checkpoint_meta(data: bytes) -> bool:
    """meta.json of a checkpoint whose tensors are right."""
    path = folder() / "checkpoint-meta"
    path.mkdir(exist_ok=True)
    if not (path / "model.safetensors").is_file():
        (path / "model.safetensors").write_bytes(_checkpoint()[1])
    (path / "meta.json").write_bytes(data)
    return len(load_checkpoint(path, finite=True).tensors) > 0


@registry.add(lambda: [_checkpoint()[1]], CheckpointError, form=Framed("<Q"))
def checkpoint_tensors(data: bytes) -> bool:
    """model.safetensors of a checkpoint whose meta.json names just these bytes."""
    path = folder() / "checkpoint-tensors"
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(data)
    about = {
        "format": 1, "epoch": 3, "kit_version": "0", "saved_at": NOW, "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }  # fmt: skip
    (path / "meta.json").write_text(json.dumps(about))
    return len(load_checkpoint(path, finite=True, shapes={"a.weight": (2, 3)}).tensors) > 0


def _pickles() -> Iterator[bytes]:
    for legacy in (False, True):
        file = io.BytesIO()
        content = {"state_dict": {"encoder.conv_in.weight": torch.ones(2)}, "epoch": 3}
        torch.save(content, file, _use_new_zipfile_serialization=not legacy)
        yield file.getvalue()


@registry.add(_pickles, ConvertError, max_bytes=8192)
def pickled_weights(data: bytes) -> bool:
    """A checkpoint of another program: a pickle, of which nothing but tensors and plain values may be made."""
    path = folder() / "last.ckpt"
    path.write_bytes(data)
    content = read_checkpoint(path, "0" * 64).content
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        weights = tensors_of(content["state_dict"])
        return is_vqgan(weights) or True
    return False


def _vqgan() -> bytes:
    return save({"encoder.conv_in.weight": torch.ones(32, 3, 3, 3), "quantize.proj.weight": torch.ones(4, 8, 1, 1)})


@registry.add(lambda: [_vqgan()], ConvertError, form=Framed("<Q"), max_bytes=16_384)
def vqgan_weights(data: bytes) -> bool:
    """Weights of a VQGAN, whose sizes are read off them."""
    path = folder() / "weights.safetensors"
    path.write_bytes(data)
    weights = tensors_of(read_checkpoint(path, "0" * 64).content)
    try:
        build_vqgan(weights, "weights")
    except ConvertError:
        pass  # a whole one is too large for a seed
    return is_vqgan(weights)


def _image_tokenizers() -> Iterator[bytes]:
    small = VqganConfig(resolution=8, ch=32, ch_mult=(1, 1), num_res_blocks=1, z_channels=8, embed_dim=8, n_embed=4)
    yield save({"a": torch.ones(2)}, {"vqgan": small.model_dump_json()})
    yield save({"a": torch.ones(2)}, {"patch_vq": "{}"})


@registry.add(_image_tokenizers, ImageTokenizerError, form=Framed("<Q"), max_bytes=8192)
def image_tokenizer(data: bytes) -> bool:
    """An image tokenizer's file, named in a run file."""
    path = folder() / "image-tokenizer.safetensors"
    path.write_bytes(data)
    image_tokenizer_config(path)
    try:
        load_image_tokenizer(path)
    except ImageTokenizerError:
        pass  # its header is right, and whole weights are too large for a seed
    return True


def _events() -> Iterator[bytes]:
    yield dump_event("warning", kind="x", message="y").encode()
    yield dump_event("swarm", num_peers=3, rank=1, share=0.5, samples_per_second=2.0).encode()


@registry.add(_events, RecursionError, form=JSON)
def worker_event(data: bytes) -> bool:
    """A line of a worker's output."""
    return parse_event(data.decode("utf-8", "replace")) is not None


@registry.add(lambda: [b'{"command": "finish_at", "epoch": 3}', b'{"command": "leave"}'], ValidationError, form=JSON)
def worker_command(data: bytes) -> bool:
    """A line of a worker's input."""
    return parse_command(data) is not None


@registry.add(lambda: [WorkerSpec(run={"run_id": "demo"}).model_dump_json().encode()], ValidationError, form=JSON)
def worker_spec(data: bytes) -> bool:
    """The first line of a worker's input."""
    return WorkerSpec.model_validate_json(data) is not None


@registry.add(
    lambda: [b'[{"epoch": 3, "checkpoint": "epoch-000003", "root": "", "confirmed": true}]', b"[]"], form=JSON
)
def monitor_states(data: bytes) -> bool:
    """The monitor's list of kept states. A damaged one is rebuilt from the folders."""
    place = folder() / "monitor"
    (place / "checkpoints" / "epoch-000003").mkdir(parents=True, exist_ok=True)
    (place / "states.json").write_bytes(data)
    kept = KeptStates(place)
    kept.roots, kept.confirmed, kept.waiting  # noqa: B018  all are computed
    return True


@registry.add(lambda: [b'{"to_epoch": 3, "time": 1}'], form=JSON)
def asked_of_monitor(data: bytes) -> bool:
    """A moderator's question to a monitor."""
    place = folder() / "asked-of" / "asked"
    place.mkdir(parents=True, exist_ok=True)
    (place / "one.json").write_bytes(data)
    answer_all(place.parent, lambda epoch: (True, str(epoch)))
    return True


def _home_files() -> Iterator[bytes]:
    yield b'{"peers": ["/ip4/127.0.0.1/tcp/1/p2p/QmPeer"]}'
    yield b'{"fingerprint": "0123456789abcdef", "time": 1800000000}'


@registry.add(_home_files, form=JSON)
def home_file(data: bytes) -> bool:
    """What a volunteer's home remembers."""
    home = Home(folder() / "home", "test", "0123456789abcdef")
    home.path.mkdir(parents=True, exist_ok=True)
    for name in ("peers.json", "stay.json", "status.json"):
        (home.path / name).write_bytes(data)
    home.was_here("0123456789abcdef")
    home.status()
    return bool(home.known_peers())


@registry.add(
    lambda: [b'{"key": {"largest": 16}, "batch_size": 8, "checkpointing": true, "peak_bytes": 3.5}'], form=JSON
)
def tuned_setting(data: bytes) -> bool:
    """A batch size that was measured before."""
    remembered = Remembered(folder(), {"largest": 16})
    remembered._path.write_bytes(data)
    os.utime(remembered._path, (NOW, NOW))
    return remembered.load() is not None


@registry.add(
    lambda: [b'{"shard": "0", "records": 3, "counts": {}, "ended_early": false, "sha256": "0", "settings": {}}'],
    DataError,
    RecursionError,
    form=JSON,
)
def encode_report(data: bytes) -> bool:
    """The report beside a shard of codes."""
    path = folder() / "0.report.json"
    path.write_bytes(data)
    return read_report(path) is not None


@registry.add(
    lambda: [(run_keys().keys.path / "authority.pem").read_bytes()], KeysError, form=Text("-----BEGIN ", "=", "\n")
)
def key_file(data: bytes) -> bool:
    """A key of the host's, damaged."""
    path = folder() / "keys"
    path.mkdir(exist_ok=True)
    for kept in run_keys().keys.path.iterdir():
        (path / kept.name).write_bytes(data if kept.name == "authority.pem" else kept.read_bytes())
    return KeyFolder(path).signer("authority") is not None


def _identity() -> bytes:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa
    from hivemind.proto import crypto_pb2

    key = rsa.generate_private_key(65537, 2048)
    der = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    return crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=der).SerializeToString()


@registry.add(lambda: [_identity()], SwarmError)
def identity_file(data: bytes) -> bool:
    """A peer's libp2p key, damaged."""
    path = folder() / "identity.key"
    path.write_bytes(data)
    return ensure_identity(path).key_size > 0


@registry.add(
    lambda: [b'{"username": "ada", "reason": "x", "samples": 3.5, "here": true}'],
    ValueError,
    RecursionError,
    form=JSON,
)
def journal_event(data: bytes) -> bool:
    """What strangers say of themselves, on its way into the journal and onto screens."""
    said = json.loads(data)
    for value in (said, *(said.values() if isinstance(said, dict) else ())):
        amount(value), whole(value), maybe(value)
        shown = line(value, 96)
        assert len(shown) <= 96 and "\n" not in shown and "\x1b" not in shown
    return bool(fields(said)) if isinstance(said, dict) else False
