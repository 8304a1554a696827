"""Fuzz the readers that all words between peers go through."""

from __future__ import annotations

from typing import Any

from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer

from tests.fuzz.forms import MSGPACK
from tests.fuzz.target import Registry
from tests.fuzz.targets.common import MEMBERS, UNREADABLE

registry = Registry()


def serialized(*values: Any):
    return lambda: map(MSGPackSerializer.dumps, values)


@registry.add(
    serialized((1, (2, [3.0, b"x"])), {"a": (None, True)}, [b"\0" * 34, "text", (), ((1,),)]), Exception, form=MSGPACK
)
def serializer(data: bytes) -> bool:
    """hivemind's serializer, in the DHT. It may raise anything that `except Exception` takes; it must not end the
    process."""
    MSGPackSerializer.loads(data)
    return True


@registry.add(lambda: [MEMBERS[0].to_bytes(), MEMBERS[0].to_base58().encode()], *UNREADABLE)
def peer_id(data: bytes) -> bool:
    """hivemind's peer ids, as they come in groups and addresses."""
    str(PeerID(data))
    PeerID.from_base58(data.decode("latin-1"))
    return True
