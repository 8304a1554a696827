"""Nodes: what they say to each other beside a round's values, and the states that newcomers take."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.utils.crypto import RSAPrivateKey

from tests.fuzz.forms import MSGPACK, Framed
from tests.fuzz.target import Registry
from tests.fuzz.targets.common import folder
from tests.node_words import BODIES, RECORDS, TWO
from volunteer_kit.optim.lamb import Lamb
from volunteer_kit.swarm.node.access import named_in
from volunteer_kit.swarm.node.credentials import certified, make_credential, read_credential
from volunteer_kit.swarm.node.statements import BadSignature
from volunteer_kit.swarm.node.training_state import TrainingState, UnusableState
from volunteer_kit.swarm.node.transfers import (
    FRESH,
    HASHES,
    MOST_OFFER,
    NEWEST,
    AnswersWanted,
    CheckpointWanted,
    ChunkWanted,
    Offer,
    OfferWanted,
)
from volunteer_kit.swarm.node.witnesses import MOST_SEED, Held, Question, Testimony, attest
from volunteer_kit.swarm.state.agreement import FRESH_SIZE
from volunteer_kit.swarm.sync.messages import HeadRecord, Message, Record
from volunteer_kit.swarm.wire import WireError, decode, encode

registry = Registry()
SNAPSHOT = next(record.snapshot for record in RECORDS if isinstance(record, HeadRecord))


@registry.add(
    lambda: [encode(Message(head, body)) for body in BODIES for head in (None, TWO.head)],
    WireError,
    form=MSGPACK,
    max_bytes=16_384,
)
def node_message(data: bytes) -> bool:
    """A message of the protocol, and whom it names."""
    message: Message = decode(Message, data)
    named_in(message)
    assert decode(Message, encode(message)) == message
    return True


@registry.add(lambda: [encode(record, Record) for record in RECORDS], WireError, form=MSGPACK, max_bytes=16_384)
def node_record(data: bytes) -> bool:
    """Decode the record that a node wrote down for its next life, on a disk that may have failed."""
    decode(Record, data)
    return True


def _add(kind: Any, *seeds: Any, most: int | None = None) -> None:
    """A target for one kind of words around a transfer."""

    @registry.add(
        lambda: [encode(seed) for seed in seeds], WireError, name=f"transfer_{kind.__name__.lower()}", form=MSGPACK,
        max_bytes=16_384,
    )  # fmt: skip
    def said(data: bytes) -> bool:
        decode(kind, data) if most is None else decode(kind, data, most)
        return True


_add(AnswersWanted, AnswersWanted(()), AnswersWanted((b"a" * 32, b"b" * 32)))
_add(CheckpointWanted, CheckpointWanted(b"l" * 32, b"d" * 32))
_add(OfferWanted, OfferWanted(), OfferWanted(FRESH), OfferWanted(NEWEST, b"r" * 32))
_add(ChunkWanted, ChunkWanted(HASHES), ChunkWanted(0), ChunkWanted(2**20))
_add(Offer, Offer(SNAPSHOT, b"s" * 64, 5000, b"d" * 32), most=MOST_OFFER)


@registry.add(
    lambda: [encode(Question(b"l" * 32)), encode(Question(b"l" * 32, MOST_SEED - 1))],
    WireError,
    form=MSGPACK,
)
def witness_question(data: bytes) -> bool:
    """Decode another member's question for what this peer holds at a lineage."""
    decode(Question, data)
    return True


SKETCH = torch.linspace(-1, 1, FRESH_SIZE).numpy().astype("<f4").tobytes()


@registry.add(
    lambda: [
        encode(Testimony(-1, False, False)),
        encode(Testimony(20, True, True, b"r" * 32, 5000)),
        encode(Testimony(20, True, True, b"o" * 32, 5000, SKETCH)),
    ],
    WireError,
    form=MSGPACK,
)
def witness_testimony(data: bytes) -> bool:
    """Decode a witness's testimony, and count it for or against a state."""
    said: Testimony = decode(Testimony, data)
    counted = attest(Held(20, b"r" * 32, SKETCH), {"account": said}, 1e-3)
    assert counted.confirmed + counted.denied + counted.silent <= 1
    return True


@functools.lru_cache(maxsize=1)
def _credential() -> bytes:
    return make_credential(RSAPrivateKey(), Ed25519PrivateKey.from_private_bytes(bytes(32)), "run")


@registry.add(lambda: [_credential()], BadSignature, form=MSGPACK)
def node_credential(data: bytes) -> bool:
    """Read the credential by which a peer's key vouches for its node's key."""
    return bool(certified(read_credential(data), "run").peer)


@functools.lru_cache(maxsize=1)
def _state() -> TrainingState:
    params = [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.zeros(4))]
    return TrainingState(params, lambda groups: Lamb(groups, lr=0.1), None, ["a", "b"])


def _files() -> Iterator[bytes]:
    path = folder() / "seed of a state"
    _state().save(path)
    yield path.read_bytes()


@registry.add(_files, UnusableState, form=Framed("<Q"), max_bytes=16_384)
def training_state(data: bytes) -> bool:
    """A state that another peer gives."""
    path = folder() / "training state"
    path.write_bytes(data)
    _state().check(path)
    return True
