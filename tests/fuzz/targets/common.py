"""What several targets need: peers, keys, calls of handlers without a network."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.p2p import PeerID

from tests.trust import RunKeys
from volunteer_kit.auth.keys import Signer
from volunteer_kit.swarm.net.bounded_names import bound_names
from volunteer_kit.swarm.net.serializer import bound_serializer

bound_serializer()  # as every process does that speaks with peers
bound_names()

# what msgpack itself answers to bytes that it cannot read; all but the last are its ValueErrors
UNREADABLE = (ValueError, TypeError, msgpack.UnpackException)
MEMBERS = [PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(4)]
CALLER = MEMBERS[1]


@functools.lru_cache(maxsize=1)
def run_keys() -> RunKeys:
    """Keys of a run "test", the same in every process, in a folder that lasts as long as this one."""
    place = folder() / "test"
    place.mkdir()
    for number, name in enumerate(("root", "authority", "monitor"), start=1):
        key = Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        (place / f"{name}.pem").write_bytes(key.private_bytes(*form))
    return RunKeys(folder())


@functools.lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="volunteer-kit-fuzz-")


def folder() -> Path:
    """A folder of this process."""
    return Path(_folder().name)


@functools.lru_cache(maxsize=4)
def signer(role: str) -> Signer:
    return run_keys().keys.signer(role)


@functools.lru_cache(maxsize=1)
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def call(handler: Any, request: Any) -> Any:
    """The answer of a handler of streams to `request` of a peer."""
    return loop().run_until_complete(handler(request, SimpleNamespace(remote_id=CALLER)))
