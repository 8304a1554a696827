"""Records in the DHT, signed by the peer that they are of: any content is possible, for anybody can sign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hivemind.utils import MSGPackSerializer, ValueWithExpiration

from tests.fuzz.forms import MSGPACK
from tests.fuzz.frozen_clock import NOW
from tests.fuzz.target import Registry
from tests.fuzz.targets.common import MEMBERS, UNREADABLE
from tests.somebody import Somebody, record_of
from volunteer_kit.swarm.leases.records import LeaseRecord, PlaceRecord, done_ranges, free_ranges
from volunteer_kit.swarm.records.device_speeds import believed_speeds
from volunteer_kit.swarm.records.peer_record import PeerRecord, parse_record
from volunteer_kit.swarm.verification.convictions import Convicted, Conviction, evidence_of, words_of

registry = Registry()
SOMEBODY = Somebody()
OWN = SOMEBODY.peer_id.to_bytes()
STRIKE = dict(
    accused=MEMBERS[2].to_bytes(), epoch=3, round=b"r" * 8, cause="gradient", jurors_for=3, jurors_against=0,
    group_size=5, details="its gradient is not the one of its samples", at=NOW,
)  # fmt: skip


def _read(schema: Any, data: bytes) -> Any:
    """A record of this schema, or None."""
    try:
        value = MSGPackSerializer.loads(data)
    except UNREADABLE:
        return None
    if isinstance(value, dict) and "peer_id" in value:
        value["peer_id"] = OWN  # whose key has signed it
    return parse_record(schema, SOMEBODY.subkey, ValueWithExpiration(value, NOW))


def _record(schema: Any, use: Callable[[Any], Any], *seeds: dict[str, Any]) -> Callable[[bytes], bool]:
    def decode(data: bytes) -> bool:
        record = _read(schema, data)
        if record is not None:
            use(record)
        return record is not None

    name = "record_" + "".join(f"_{c.lower()}" if c.isupper() else c for c in schema.__name__).strip("_")
    seeds = [MSGPackSerializer.dumps({**seed, "peer_id": OWN}) for seed in seeds]
    registry.add(lambda: seeds, name=name, form=MSGPACK)(decode)
    return decode


def _use_peer(record: PeerRecord) -> None:
    records = {SOMEBODY.peer_id: record, MEMBERS[1]: record_of(MEMBERS[1])}
    believed_speeds(records, None, 1000.0)


def _use_lease(record: LeaseRecord) -> None:
    done_ranges([record, record])
    free_ranges([record, record], 100, 4, NOW)
    free_ranges([record], None, 4, NOW)


def _use_conviction(record: Conviction) -> None:
    said = {SOMEBODY.peer_id: record.strikes}
    evidence_of(MEMBERS[2], said, 4).to_text()
    words_of(MEMBERS[2], said, 4)


_peer = record_of(SOMEBODY.peer_id).dict()
_record(PeerRecord, _use_peer, _peer, {**_peer, "loss": None, "rounds": {"rounds": 3, "failed": {"timeout": 1}}})
_record(
    LeaseRecord,
    _use_lease,
    {"held": [[0, 4], [8, 2**31]], "used": 3, "until": NOW + 60, "done": [[4, 8]], "seen": [[20, 22]]},
)
_record(PlaceRecord, lambda record: None, {"epoch": 2, "place": 17})
_record(Conviction, _use_conviction, {"strikes": [STRIKE]}, {"strikes": [{**STRIKE, "cause": "silence"}] * 3})
_record(Convicted, lambda record: None, {"accused": MEMBERS[2].to_bytes() + MEMBERS[3].to_bytes()}, {"accused": b""})
