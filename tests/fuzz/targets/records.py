"""Records in the DHT, signed by the peer that they are of: any content is possible, for anybody can sign."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.utils import MSGPackSerializer, ValueWithExpiration

from tests.fuzz.forms import MSGPACK
from tests.fuzz.frozen_clock import NOW
from tests.fuzz.target import Registry
from tests.fuzz.targets.common import MEMBERS, UNREADABLE
from tests.somebody import Somebody, record_of
from volunteer_kit.swarm.believed_progress import Claims, believed_samples
from volunteer_kit.swarm.believed_speed import believed_speeds
from volunteer_kit.swarm.convictions import Convicted, Conviction, evidence_of, words_of
from volunteer_kit.swarm.credit_bounds import Bounds, believed_weights
from volunteer_kit.swarm.lease_records import LeaseRecord, PlaceRecord, done_ranges, free_ranges
from volunteer_kit.swarm.plausible import Limits, believed_epoch, is_plausible
from volunteer_kit.swarm.receipts import ENTRY, Receipt, machines_of, read_receipts
from volunteer_kit.swarm.records import PeerRecord, parse_record

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
    bounds = Bounds(target_batch_size=256, max_samples_per_second=1000.0)
    believed_speeds(records, None, 1000.0)
    believed_weights({SOMEBODY.peer_id: 3.0, MEMBERS[1]: 2.0}, 60.0, machines_of(records, None), bounds)


def _use_progress(claim: LocalTrainingProgress) -> None:
    limits, claims = Limits(target_batch_size=256), Claims()
    if not is_plausible(claim, limits, NOW, 60.0):
        return
    claims.note(SOMEBODY.peer_id, claim.epoch, claim.samples_accumulated, claim.samples_per_second)
    claims.settle(claim.epoch, [SOMEBODY.peer_id], {SOMEBODY.peer_id: 1.0}, 256)
    believed_samples(claim.samples_accumulated, claims.share(SOMEBODY.peer_id), None)
    believed_epoch([(claim.epoch, b"a"), (3, b"b")], 3, 2)


def _use_lease(record: LeaseRecord) -> None:
    done_ranges([record, record])
    free_ranges([record, record], 100, 4, NOW)
    free_ranges([record], None, 4, NOW)


def _use_conviction(record: Conviction) -> None:
    said = {SOMEBODY.peer_id: record.strikes}
    evidence_of(MEMBERS[2], said, 4).to_text()
    words_of(MEMBERS[2], said, 4)


def _use_receipt(receipt: Receipt) -> None:
    receipt.samples, receipt.signer  # noqa: B018  both are computed
    found = SimpleNamespace(value={SOMEBODY.subkey: ValueWithExpiration(receipt.dict(), NOW)})
    read_receipts(None, receipt.epoch, found)


_peer = record_of(SOMEBODY.peer_id).dict()
_record(PeerRecord, _use_peer, _peer, {**_peer, "loss": None, "rounds": {"rounds": 3, "failed": {"timeout": 1}}})
_record(LocalTrainingProgress, _use_progress, {**SOMEBODY.claims(), "time": NOW})
_record(
    LeaseRecord,
    _use_lease,
    {"held": [[0, 4], [8, 2**31]], "used": 3, "until": NOW + 60, "done": [[4, 8]], "seen": [[20, 22]]},
)
_record(PlaceRecord, lambda record: None, {"epoch": 2, "place": 17})
_record(
    Receipt,
    _use_receipt,
    {
        "epoch": 3, "round": b"r" * 8, "before": b"b" * 8, "after": b"a" * 8, "time": NOW,
        "senders": ENTRY.pack(b"1" * 8, 7) + ENTRY.pack(b"2" * 8, 9),
    },
)  # fmt: skip
_record(Conviction, _use_conviction, {"strikes": [STRIKE]}, {"strikes": [{**STRIKE, "cause": "silence"}] * 3})
_record(Convicted, lambda record: None, {"accused": MEMBERS[2].to_bytes() + MEMBERS[3].to_bytes()}, {"accused": b""})
