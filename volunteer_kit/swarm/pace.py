"""What one averager has learnt of its rounds, in its own process: how long they take, who is late, what our line
carries; and how that goes round the group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median_low

from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID
from hivemind.utils.serializer import SerializerBase

from volunteer_kit.swarm.allreduce import SwarmAllReduce
from volunteer_kit.swarm.line_speed import LineSpeed
from volunteer_kit.swarm.shares import LateReducers, in_proportion, late_by_most
from volunteer_kit.swarm.sync.timing import Deadline, agreed
from volunteer_kit.swarm.told_group import UNUSABLE, Entry, read_entry, with_pace

SILENT = 0.5  # of an exchange's time: who was not heard for so long, at its end, is taken for gone


class Pace:
    """:param serializer: of what members tell
    :param speed: our line's, shared by this peer's averagers
    :param bandwidth: what is told instead of it; None: nothing else
    :param exchange_timeout: s, the run's own; None: no deadline at all
    """

    def __init__(
        self,
        serializer: type[SerializerBase],
        speed: LineSpeed,
        bandwidth: float | None,
        exchange_timeout: float | None,
    ):
        self._serializer, self._speed, self._bandwidth = serializer, speed, bandwidth
        self.exchange = None if exchange_timeout is None else Deadline(exchange_timeout)
        self._late = LateReducers()
        self._silent: set[PeerID] = set()  # at the end of our last round
        self.mark = b""  # told with the rest: of what our last round has left with us
        self.least = 0  # likewise: members that our next group should have

    def told(self, entry: bytes) -> bytes:
        """Our entry for the next group, with what we know."""
        bandwidth = self._speed.mbps if self._bandwidth is None else self._bandwidth
        seconds = self.exchange.learnt if self.exchange is not None else None
        return with_pace(entry, self._serializer, bandwidth, seconds, self._late.named, self.mark, self.least)

    def _entries(self, told: Sequence[bytes]) -> list[Entry]:
        return [read_entry(data, self._serializer) or UNUSABLE for data in told]

    def is_marked_alike(self, group: GroupInfo) -> bool:
        """Has the last round left the same with all members?"""
        return {entry.mark for entry in self._entries(group.gathered)} == {self.mark} != {b""}

    def are_too_few(self, told: Sequence[bytes]) -> bool:
        """By what half of those who have `told` this think at least, so that one stranger's word keeps nobody from a
        round."""
        return len(told) < median_low(entry.least for entry in self._entries(told))

    def exchange_seconds(self, group: GroupInfo) -> float | None:
        """This group's deadline for its exchange."""
        if self.exchange is None:
            return None
        told = [entry.seconds for entry in self._entries(group.gathered)]
        return agreed(told, self.exchange.floor, self.exchange.ceiling)

    def proportions(self, group: GroupInfo, bandwidths: Sequence[float | None]) -> list[float | None]:
        """Of the work, from the bandwidths that the members told; 0 for clients."""
        late = late_by_most(group.peer_ids, [entry.late for entry in self._entries(group.gathered)])
        return in_proportion(bandwidths, late)

    def over(self, runner: SwarmAllReduce, own_id: PeerID) -> None:
        """A round had an end.

        Whoever was late and still sent something needs more time. Who was silent is gone, and to wait longer for the
        next one would be in vain; unless it comes to that round as well, and is silent for as long again: then its line
        needs more for a single part.
        """
        late = {*runner.failed_reducers, *runner.too_slow} - {own_id}
        self._late.note(runner.answered_after, runner.failed_reducers)
        if self.exchange is None:
            return
        now = time.monotonic()
        took = now - runner.began
        silent = {peer for peer in late if now - runner.heard.get(peer, runner.began) >= SILENT * took}
        slow, self._silent = late - (silent - self._silent), silent
        if slow:
            self.exchange.failed(len(slow) / max(1, runner.group_size - 1))
        elif not late:
            self.exchange.succeeded(took)

    def failed(self) -> None:
        """It had none that could be used."""
        if self.exchange is not None:
            self.exchange.failed()
