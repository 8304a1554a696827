"""What a leader told the members of a group, and what follows when it told them different things.

Members share out the tensors by the leader's list: peer ids, and of each what it gathered (bandwidth, mode, words). The
leader is a stranger, and could give each member another list; two who cut the tensors at different places would then
average one's weights with the other's biases. So members exchange parts under an id made of all that they were told:
who was told something else finds no group here, and both learn it from the answer.
"""

from __future__ import annotations

import hashlib
import time

from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking, MatchmakingException
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

LED_APART = "the leader told members different groups"
# what a member answers that runs a group of other words at this moment; who has just left any answers BAD_GROUP_ID
OTHER_GROUP = averaging_pb2.PROTOCOL_VIOLATION
MAX_GROUP_ID = 64  # bytes; hivemind's have 20
DIGEST_SIZE = 16
AVOIDED_FOR = 300.0  # s that a leader is not followed again; it may still take part


class ToldOtherwise(AllreduceException):
    """A member was told another group than we were."""


class LedApart(MatchmakingException):
    """Too many were. Nothing of the round is applied; hivemind looks for another group."""

    def __init__(self, why: str = LED_APART):
        super().__init__(why)


def exchange_id(group: GroupInfo) -> bytes:
    """The leader's id of a group and a digest of all that it told: equal on members that were told the same."""
    hasher = hashlib.blake2b(digest_size=DIGEST_SIZE)
    for words in (group.group_id, *(peer.to_bytes() for peer in group.peer_ids), *group.gathered):
        hasher.update(len(words).to_bytes(8, "little") + words)
    return group.group_id + hasher.digest()


def as_exchanged(group: GroupInfo) -> GroupInfo:
    """The same group, by the id under which its parts are exchanged."""
    return GroupInfo(exchange_id(group), group.peer_ids, group.gathered)


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
    """hivemind's, which knows who led the last group, and does not follow again who led us apart."""

    leader: PeerID | None = None

    def __init__(self, *args, **kwargs):
        self._avoided: dict[PeerID, float] = {}  # until
        super().__init__(*args, **kwargs)

    def avoid(self, leader: PeerID) -> None:
        if leader != self.peer_id:
            self._avoided[leader] = time.monotonic() + AVOIDED_FOR

    async def _request_join_group(self, leader: PeerID) -> GroupInfo | None:
        if self._avoided.get(leader, 0.0) > time.monotonic():
            return None
        return await super()._request_join_group(leader)

    async def leader_assemble_group(self) -> GroupInfo:
        self.leader = self.peer_id
        return await super().leader_assemble_group()

    async def follower_assemble_group(self, leader: PeerID, msg: averaging_pb2.MessageFromLeader) -> GroupInfo:
        self.leader = leader
        return await super().follower_assemble_group(leader, msg)
