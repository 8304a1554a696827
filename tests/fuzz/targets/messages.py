"""Messages between averagers, and what members of a group tell each other."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer, ValueWithExpiration

from tests.fuzz.forms import MSGPACK
from tests.fuzz.target import Registry
from tests.fuzz.targets.common import (
    CALLER,
    MEMBERS,
    UNREADABLE,
    Unreadable,
    call,
    download,
    folder,
    loads,
    loop,
    packed,
)
from volunteer_kit.swarm.acceptance import hear, read_testimony
from volunteer_kit.swarm.admission import Admission
from volunteer_kit.swarm.agreement import (
    SKETCH_SIZE,
    Told,
    apart,
    out_of_step,
    rank_donors,
    read_past,
    read_told,
    whom_to_follow,
)
from volunteer_kit.swarm.chunk_transfer import ChunkTransfer, read_chunk_donors
from volunteer_kit.swarm.codec import CODECS, install_codecs
from volunteer_kit.swarm.line_speed import LineSpeed
from volunteer_kit.swarm.lost_answers import GivenAnswers
from volunteer_kit.swarm.missed_rounds import RoundsLogged
from volunteer_kit.swarm.pace import Pace
from volunteer_kit.swarm.told_group import exchange_id, in_order, is_split, read_entry, with_pace
from volunteer_kit.swarm.traffic import Traffic
from volunteer_kit.swarm.transfer import read_donors

install_codecs()
registry = Registry()
TOLD = Told(7, np.ones(SKETCH_SIZE), b"lineage1", 3).words()
ENTRY = MSGPackSerializer.dumps([10.0, 0, MSGPackSerializer.dumps([TOLD, b"token"])])


def serialized(*values: Any):
    return lambda: map(MSGPackSerializer.dumps, values)


@registry.add(
    serialized((1, (2, [3.0, b"x"])), {"a": (None, True)}, [b"\0" * 34, "text", (), ((1,),)]), Exception, form=MSGPACK
)
def serializer(data: bytes) -> bool:
    """hivemind's serializer, in DHT, groups and states. It may raise anything that `except Exception` takes; it must
    not end the process."""
    MSGPackSerializer.loads(data)
    return True


@registry.add(serialized(TOLD, TOLD[:3], TOLD[:1]), Unreadable, form=MSGPACK)
def told(data: bytes) -> bool:
    """What a member says that it holds; and what follows for us when all others say it."""
    words = loads(data)
    all_told = {MEMBERS[0]: TOLD, MEMBERS[1]: words, MEMBERS[2]: words}
    whom_to_follow(all_told, MEMBERS[0], MEMBERS)
    out_of_step(all_told, MEMBERS)
    apart(all_told, MEMBERS)
    rank_donors(all_told, MEMBERS, 3)
    return read_told(words) is not None


@registry.add(serialized([TOLD[:3]] * 3, []), Unreadable, form=MSGPACK)
def told_past(data: bytes) -> bool:
    """What a state says that it was after its last epochs."""
    return bool(read_past(loads(data)))


@registry.add(serialized([TOLD[:3], 9, b"\0" * 1024], [None, 9, b""]), Unreadable, form=MSGPACK)
def testimony(data: bytes) -> bool:
    """A witness's answer of rpc_get_told."""
    said = read_testimony(loads(data))
    hear(read_told(TOLD), {b"a": said.told, b"b": read_told(TOLD)}, [[b"b"]], [b"a"])
    return said.told is not None


def _entries():
    yield ENTRY
    yield with_pace(ENTRY, MSGPackSerializer, 25.0, 4.5, [b"12345678"], b"m" * 16, 3)
    yield MSGPackSerializer.dumps([None, 1, MSGPackSerializer.dumps(None)])


@registry.add(_entries, form=MSGPACK)
def group_entry(data: bytes) -> bool:
    """What one member tells its group, and what the group makes of it."""
    pace = Pace(MSGPackSerializer, LineSpeed(), None, 60.0)
    group = GroupInfo(b"g" * 20, tuple(MEMBERS[:3]), (ENTRY, data, data))
    entry = read_entry(data, MSGPackSerializer)
    is_split(3, 1)
    exchange_id(in_order(group))
    pace.are_too_few(group.gathered)
    pace.is_marked_alike(group)
    pace.exchange_seconds(group)
    pace.proportions(group, [10.0, entry.bandwidth if entry else 0.0, None])
    return entry is not None


class Averager(RoundsLogged):
    """Answers of rounds, without the rest of an averager."""

    prefix, peer_id = "gradients", MEMBERS[0]

    def __init__(self) -> None:
        self.traffic, self.doorkeeper, self.total_size = Traffic(), Admission(), 6
        self._begin_to_keep()
        answers = GivenAnswers(MEMBERS, own=0, sizes=[2, 2, 1, 1], patience=0.0)
        for place in range(4):
            answers.note(place, CODECS["none"].compress(torch.ones(2), None))
            answers.end(place)
        self._kept_answers[b"x"] = answers
        self._log_round(b"y", answers, TOLD[:3], b"round")


_averager = Averager()


@registry.add(lambda: [packed(b"x", 1, 0.5), packed(b"y", 0, 0)], *UNREADABLE, form=MSGPACK)
def count_answers(data: bytes) -> bool:
    """rpc_count_answers"""
    return call(_averager.rpc_count_answers, download(data)).metadata != b"lacks"


@registry.add(lambda: [packed(b"x", 1, 0), packed(b"y", 3, 0)], *UNREADABLE, form=MSGPACK)
def show_answer(data: bytes) -> bool:
    """rpc_show_answer"""
    for answers in _averager._kept_answers.values():
        answers._shown.clear()
    return call(_averager.rpc_show_answer, download(data)).metadata != b"lacks"


@registry.add(lambda: [packed(*TOLD[:3]), packed(8, b"\0" * 64, b"lineage2")], *UNREADABLE, form=MSGPACK)
def show_round(data: bytes) -> bool:
    """rpc_show_round"""
    return call(_averager.rpc_show_round, download(data)).metadata != b"lacks"


class Teller:
    """A stub of a peer that answers everything with the same bytes."""

    metadata = b""

    async def rpc_show_round(self, request: Any) -> Any:
        return download(self.metadata)


_teller = Teller()


@registry.add(
    lambda: [packed(b"x", b"name", [1, 1], [4, 2], b"d" * 16), b"lacks", b"under way"], form=MSGPACK
)
def round_told(data: bytes) -> bool:
    """What a member answers to rpc_show_round; its answer counts as no account's word if it cannot be read."""
    _teller.metadata = data
    told = loop().run_until_complete(_averager._ask_for_round(TOLD[:3], {CALLER: _teller}))
    return isinstance(told.get(CALLER), tuple)


class Donor(ChunkTransfer):
    """Its chunks' side, without the rest of an averager."""

    serializer = MSGPackSerializer
    doorkeeper, traffic = Admission(), Traffic()
    _parent_pid = 0  # it is never started, and nothing of it has to be ended

    def __init__(self) -> None:
        self._serving, self._serving_to, self._in_turn, self._stores = 0, Counter(), defaultdict(asyncio.Lock), {}
        self._served = folder()


_donor = Donor()


@registry.add(serialized([b"r" * 32, 0], [b"r" * 32, -1]), *UNREADABLE, form=MSGPACK)
def chunk_request(data: bytes) -> bool:
    """rpc_get_chunk"""
    return call(_donor.rpc_get_chunk, download(data)).metadata == b"lacks"


@registry.add(
    serialized({MEMBERS[1].to_bytes(): [b"12345678"]}, {MEMBERS[2].to_bytes(): TOLD}), Unreadable, form=MSGPACK
)
def declared(data: bytes) -> bool:
    """What stands in the DHT under the keys of donors of states and of chunks."""
    records = loads(data)
    if isinstance(records, dict):
        records = {key: ValueWithExpiration(value, 1.0) for key, value in records.items()}
    donors = read_donors(records, MEMBERS[0])
    rank_donors(donors, sorted(donors), None)
    return bool(read_chunk_donors(records, b"12345678" + bytes(24), MEMBERS[0]) or donors)


@registry.add(lambda: [MEMBERS[0].to_bytes(), MEMBERS[0].to_base58().encode()], *UNREADABLE)
def peer_id(data: bytes) -> bool:
    """hivemind's peer ids, as they come in groups and addresses."""
    str(PeerID(data))
    PeerID.from_base58(data.decode("latin-1"))
    return True


