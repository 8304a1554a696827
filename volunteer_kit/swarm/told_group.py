"""What a leader told the members of a group, and what follows when it told them different things.

Members share out the tensors by the leader's list: peer ids, and of each what it gathered (bandwidth, mode, words). The
leader is a stranger, and could give each member another list; two who cut the tensors at different places would then
average one's weights with the other's biases. So members exchange parts under an id made of all that they were told:
who was told something else finds no group here, and both learn it from the answer. A lie that it tells everybody is
seen by the one that it is about, who knows what it had told.

What a member told is a stranger's word, too. A leader lets nobody in whose word nobody could use; and whoever reads
such a word all the same takes its member for one that neither sends nor reduces, as all others do.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking, MatchmakingException
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import ValueWithExpiration, get_dht_time
from hivemind.utils.asyncio import cancel_and_wait
from hivemind.utils.logging import get_logger
from hivemind.utils.serializer import SerializerBase

from volunteer_kit.swarm.errors import brief
from volunteer_kit.swarm.identity import is_peer_id
from volunteer_kit.swarm.shared_words import MAX_GROUP_SIZE
from volunteer_kit.swarm.shares import MAX_NAMED, NAME_SIZE
from volunteer_kit.swarm.sync.timing import Deadline

logger = get_logger(__name__)
LED_APART = "the leader told members different groups"
MISQUOTED = "the leader told the group something else of us than we had told it"
# what a member answers that runs a group of other words at this moment; who has just left any answers BAD_GROUP_ID
OTHER_GROUP = averaging_pb2.PROTOCOL_VIOLATION
MAX_GROUP_ID = 64  # bytes; hivemind's have 20
MAX_GATHERED_BYTES = 4096  # what one member may tell its group; ours is under 500 bytes
MAX_REDIRECTS = 8  # leaders, each of which sends us on to the next
DIGEST_SIZE = MARK_SIZE = 16
# of the run's matchmaking_time, and s: waited for who is expected, at least. An entry takes a second or two to spread
MATCHMAKING_FLOOR, LEAST_MATCHMAKING = 1 / 5, 1.0
LATER = 0.01  # s
# matchmaking times that a leader waits for those who are here and will come, and that a client says it waits: clocks
# may differ, and a leader that says it waits longer refuses it
LONGEST, CLIENTS = 2.0, 3.0
CHECK = 0.05  # s
REQUEST_SHARE = 0.8  # of that time, for a leader's answer; two that ask each other are deadlocked for so long
AVOIDED_AT_ONCE = 4.0  # matchmaking times of one search: two in which it could have come to us
AVOIDED_FOR = 300.0  # s that a leader is not followed again, while others lead; it may still take part
MIN_BANDWIDTH, MAX_BANDWIDTH = 1e-3, 1e12  # in any unit that somebody may take, and load balancing can calculate with
MAX_SECONDS = 1e6  # that anybody can say a round takes


class TooFew(MatchmakingException):
    """No more than half of those who usually come. They may be cut off from the rest, who go on: what they came to
    would be nobody else's. hivemind looks for another group."""


class ToldOtherwise(AllreduceException):
    """A member was told another group than we were."""


class LedApart(MatchmakingException):
    """Too many were, or the leader told the group a lie of us. Nothing of the round is applied; hivemind looks for
    another group."""

    def __init__(self, why: str = LED_APART):
        super().__init__(why)


# --- what a member tells ---


@dataclass(frozen=True)
class Entry:
    """What one member tells its group of itself: hivemind's three, see DecentralizedAverager.step, and our own; of
    these, what cannot be read is as if it had not been told."""

    bandwidth: float | None  # Mbit/s; None: as much as the others have
    mode: AveragingMode
    words: Any
    seconds: float | None = None  # that it has learnt to await a round; None: it does not know
    late: frozenset[bytes] = frozenset()  # names of reducers that it has seen being late
    mark: bytes = b""  # of what its last round has left with it, for the next one
    least: int = 0  # members that its group should have


UNUSABLE = Entry(0.0, AveragingMode.AUX, None)  # neither sends nor reduces


def read_entry(data: bytes, serializer: type[SerializerBase]) -> Entry | None:
    """None: no group could use it."""
    if len(data) > MAX_GATHERED_BYTES:
        return None
    try:
        bandwidth, mode, user_data, *more = serializer.loads(data)
        words = serializer.loads(user_data)
    except Exception:  # whatever a stranger's bytes make of the serializer
        return None
    if type(mode) is not int or mode not in (known.value for known in AveragingMode):
        return None
    if bandwidth is not None and not _is_bandwidth(bandwidth):
        return None
    seconds, late, *rest = more[0] if more and type(more[0]) is list and len(more[0]) >= 2 else (None, ())
    mark = rest[0] if rest and type(rest[0]) is bytes and len(rest[0]) == MARK_SIZE else b""
    least = rest[1] if len(rest) > 1 and type(rest[1]) is int and 0 <= rest[1] <= MAX_GROUP_SIZE else 0
    return Entry(bandwidth, AveragingMode(mode), words, _read_seconds(seconds), _read_names(late), mark, least)


def with_pace(
    data: bytes,
    serializer: type[SerializerBase],
    bandwidth: float | None,
    seconds: float | None,
    late: Sequence[bytes],
    mark: bytes = b"",
    least: int = 0,
) -> bytes:
    """The entry that hivemind has made, with what our rounds have shown. Later kits may tell more behind it.

    A bandwidth that nobody would believe is told as the nearest that they do: an entry with another is of no use to
    anybody, and where it is the only reducer's no round would ever be again.
    """
    _, mode, user_data = serializer.loads(data)[:3]
    if bandwidth:
        bandwidth = min(MAX_BANDWIDTH, max(MIN_BANDWIDTH, bandwidth))
    more = [mark, least] if least else [mark] if mark else []
    return serializer.dumps([bandwidth, mode, user_data, [seconds, list(late), *more]])


def _read_seconds(told: Any) -> float | None:
    return float(told) if type(told) in (int, float) and 0 < told < MAX_SECONDS else None


def _read_names(told: Any) -> frozenset[bytes]:
    names = told[:MAX_NAMED] if type(told) in (list, tuple) else ()
    return frozenset(name for name in names if isinstance(name, bytes) and len(name) == NAME_SIZE)


def _is_bandwidth(told: Any) -> bool:
    return type(told) in (int, float) and (told == 0 or MIN_BANDWIDTH <= told <= MAX_BANDWIDTH)


# --- what a leader told of them ---


def check_group(told: averaging_pb2.MessageFromLeader) -> None:
    """Raises ValueError unless a leader's list is short, and of peers."""
    size = len(told.ordered_peer_ids)
    if not 0 < len(told.group_id) <= MAX_GROUP_ID:
        raise ValueError(f"a group with a name of {len(told.group_id)} bytes")
    if not 1 < size <= MAX_GROUP_SIZE or len(told.gathered) != size:
        raise ValueError(f"a group of {size} peers, with what {len(told.gathered)} told")
    if not all(map(is_peer_id, told.ordered_peer_ids)):
        raise ValueError("a group with a member that is no peer")
    if (longest := max(map(len, told.gathered))) > MAX_GATHERED_BYTES:
        raise ValueError(f"a member told its group {longest} bytes")


def exchange_id(group: GroupInfo) -> bytes:
    """The leader's id of a group and a digest of all that it told: equal on members that were told the same."""
    hasher = hashlib.blake2b(digest_size=DIGEST_SIZE)
    for words in (group.group_id, *(peer.to_bytes() for peer in group.peer_ids), *group.gathered):
        hasher.update(len(words).to_bytes(8, "little") + words)
    return group.group_id + hasher.digest()


def as_exchanged(group: GroupInfo) -> GroupInfo:
    """The same group, by the id under which its parts are exchanged."""
    return GroupInfo(exchange_id(group), group.peer_ids, group.gathered)


def in_order(group: GroupInfo) -> GroupInfo:
    """The same group, its members by their ids and not as the leader happened to draw them."""
    members = sorted(zip(group.peer_ids, group.gathered, strict=True), key=lambda member: member[0].to_bytes())
    return GroupInfo(group.group_id, *zip(*members, strict=True))


def leaders_id(exchanged: bytes) -> bytes:
    return exchanged[:-DIGEST_SIZE]


def is_split(group_size: int, otherwise: int) -> bool:
    """Were half of the members but the leader, or more, told another group than we were?

    One of many who says so may be lying itself, and costs its own slice and samples; and who sees that it is the one
    that was told otherwise takes nothing of the round. Of three members any one ends the round: of the two who were
    told something, nobody can say who is right.
    """
    return otherwise > 0 and 2 * otherwise >= group_size - 1


class WaryMatchmaking(Matchmaking):
    """hivemind's, which knows who led the last group, and whether it passed on what we had told; and which does not
    follow again who led us apart."""

    leader: PeerID | None = None
    on_group: Callable[[], None] = staticmethod(lambda: None)  # called again and again while somebody waits with us
    awaited_group_size: Callable[[], int] = staticmethod(lambda: 0)  # members that come for certain
    # by what these have told: data_for_gather of each
    are_too_few: Callable[[Sequence[bytes]], bool] = staticmethod(lambda told: False)

    def __init__(self, *args, **kwargs):
        self._avoided: dict[PeerID, float] = {}  # until
        self._in_vain = 0.0  # s that we have looked for groups since the last one
        self._alone_since = 0.0  # time.monotonic(), of the search under way: when it began, or somebody was avoided
        self._misquoted: deque[bytes] = deque(maxlen=16)  # ids of groups
        self.groups: deque[bytes] = deque(maxlen=16)  # that we were told, by the ids under which they exchange
        self._counted, self._are_too_few = (), False  # what we and our followers have told, and what follows
        super().__init__(*args, **kwargs)
        self._longest_request = self.request_timeout
        self._matchmaking_time = self.min_matchmaking_time
        least = max(LEAST_MATCHMAKING, self._matchmaking_time * MATCHMAKING_FLOOR)
        self.patience = Deadline(self._matchmaking_time, floor=least)
        self._declared_until = 0.0  # DHT time, the latest that we have told
        self._declare = self.group_key_manager.declare_averager
        self.group_key_manager.declare_averager = self._declare_and_note
        self.group_key_manager.get_averagers = self._find_averagers
        self._redirects = 0

    @property
    def min_group_size(self) -> int:
        """That a leader assembles. One of too few would be left by all in it; while it waits, its members and another
        leader's come together."""
        least, step = self._min_group_size, self.step_control
        if step is None or not self.current_followers:
            return least
        told = (step.data_for_gather, *(request.gather for request in self.current_followers.values()))
        if told != self._counted:  # they are strangers' words, and this is asked twenty times a second
            self._counted, self._are_too_few = told, self.are_too_few(told)
        return max(least, len(told) + 1) if self._are_too_few else least

    @min_group_size.setter
    def min_group_size(self, size: int) -> None:
        self._min_group_size = size

    async def _declare_and_note(self, group_key: str, peer_id: PeerID, expiration_time: float, **kwargs) -> bool:
        self._declared_until = max(self._declared_until, expiration_time)
        return await self._declare(group_key, peer_id, expiration_time, **kwargs)

    async def _find_averagers(self, group_key: str, only_active: bool) -> list[tuple[PeerID, float]]:
        """hivemind's, which makes a peer id of any bytes that a stranger stored, and prints those that are none."""
        found = await self.group_key_manager.dht.get(group_key, latest=True, return_future=True)
        records = found.value if found is not None and isinstance(found.value, dict) else {}
        return [
            (PeerID(key), record.expiration_time)
            for key, record in records.items()
            if is_peer_id(key) and isinstance(record, ValueWithExpiration) and (record.value or not only_active)
        ]

    async def look_for_group(self, step: StepControl) -> GroupInfo | None:
        """Until all who are expected are here; or when all are who will come for certain, and the last groups took no
        longer to come together; or until it is late.

        Who leads says to the end of it when that is, so expirations, by which hivemind chooses the leader, do not
        depend on what anybody has learnt: who begins first leads.
        """
        began = self._alone_since = time.monotonic()
        if self.client_mode:
            self.min_matchmaking_time = CLIENTS * self._matchmaking_time
        else:
            # the DHT takes what expires later for the newer word, and one that expires sooner than our last for none:
            # nobody would find us until that is over
            longest = max(LONGEST * self._matchmaking_time, self._declared_until + LATER - get_dht_time())
            self.min_matchmaking_time = self.potential_leaders.min_matchmaking_time = longest
            self.request_timeout = min(self._longest_request, REQUEST_SHARE * self.patience.seconds)
        watch, group = asyncio.create_task(self._begin_with_enough(step, began)), None
        try:
            group = await super().look_for_group(step)
        finally:
            await cancel_and_wait(watch)
            self._in_vain = 0.0 if group is not None else self._in_vain + time.monotonic() - began
            if self._in_vain >= self._matchmaking_time:
                self._avoided.clear()  # there may be nobody else: who avoids the one that leads is in no round at all
        expected = self.target_group_size
        if group is None:
            self.patience.failed()
        elif expected is not None and group.group_size >= expected:
            self.patience.succeeded(time.monotonic() - began)
        elif expected is not None:
            self.patience.failed((expected - group.group_size) / expected)
        if group is None or step.done():  # nobody awaits us then, and what we raised would be printed as a traceback
            return group
        if self.are_too_few(group.gathered):  # all its members read the same, and leave it together
            raise TooFew(f"a group of {group.group_size}")
        return group

    async def _begin_with_enough(self, step: StepControl, began: float) -> None:
        while True:
            if self.current_leader is not None or self.current_followers:
                self.on_group()
            if self._has_enough(step, began):
                async with self.lock_request_join_group:  # we may just be asking another leader
                    if self._has_enough(step, began):
                        await self.leader_assemble_group()
            await asyncio.sleep(CHECK)

    def _has_enough(self, step: StepControl, began: float) -> bool:
        if self.current_leader is not None or self.assembled_group.done() or not self.current_followers:
            return False
        is_time = time.monotonic() - began >= self.patience.seconds and get_dht_time() >= step.scheduled_time
        return is_time and 1 + len(self.current_followers) >= max(self.min_group_size, self.awaited_group_size())

    def avoid(self, leader: PeerID) -> None:
        if leader != self.peer_id:
            self._alone_since = time.monotonic()
            self._avoided[leader] = self._alone_since + AVOIDED_FOR

    def is_misquoted(self, group_id: bytes) -> bool:
        """Did the leader of this group say of us what we had not told it?"""
        return group_id in self._misquoted

    async def _request_join_group(self, leader: PeerID) -> GroupInfo | None:
        if time.monotonic() - self._alone_since >= AVOIDED_AT_ONCE * self._matchmaking_time:
            self._avoided.clear()  # it does not come to us; its expirations may be a moment before ours for ever
        if self._avoided.get(leader, 0.0) > time.monotonic() or self._redirects >= MAX_REDIRECTS:
            return None
        self._redirects += 1
        try:
            return await super()._request_join_group(leader)
        except ValueError as error:  # it sends us on to what is no peer, or its group is none
            logger.debug(f"{leader} is not followed: {brief(error)}")
            self.avoid(leader)
            return None
        finally:
            self._redirects -= 1

    async def leader_assemble_group(self) -> GroupInfo:
        self.leader = self.peer_id
        group = await super().leader_assemble_group()
        self.groups.append(exchange_id(group))
        return group

    async def follower_assemble_group(self, leader: PeerID, msg: averaging_pb2.MessageFromLeader) -> GroupInfo:
        """Raises ValueError for a group that cannot be one."""
        try:
            check_group(msg)
        except ValueError:
            self.groups.append(msg.group_id[:MAX_GROUP_ID] + bytes(DIGEST_SIZE))  # parts of it that come accuse nobody
            raise
        self.leader = leader
        group = await super().follower_assemble_group(leader, msg)
        self.groups.append(exchange_id(group))
        if group.gathered[group.peer_ids.index(self.peer_id)] != self.step_control.data_for_gather:
            self._misquoted.append(group.group_id)
        return group
