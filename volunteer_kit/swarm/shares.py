"""How members share out the work of a round: by what each says that its line carries, as far as others believe it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median_low

from hivemind.p2p import PeerID

SLOWEST = 1e-4  # times the usual bandwidth; who has less reduces nothing
# Times the usual bandwidth that anybody is believed to have. hivemind's load balancing relieves the busiest line:
# beside seven of 20/10 Mbit/s one of 1000 should get the whole vector, and the seven carry 1 vector each way
# instead of 1.75. Whoever boasts would get it as well; with what is believed it gets MOST of it, and they carry 1.43.
# Four times is for groups so large, or with so many fast lines, that nobody gets MOST by it.
FASTEST = 4.0
# Times the usual, or a part of it, that is taken for the usual. Equal lines of 10 Mbit/s were measured as much apart
# when a round had many parts; slices that wander make rounds longer than any before, which deadlines have not learnt
ALIKE = 3.0
AT_LEAST = 1.5  # of three members one that says twice would get the whole vector
MOST = 0.5  # of the vector, for one that claims more than all others
LATE_COUNTS = 0.5  # times the usual, at most, for one whose slice was late: it has boasted, or its line got worse
LATE, LATE_SECONDS = 1.25, 0.5  # times as long as the median reducer, and s more than that
REMEMBERED, FORGIVEN = 8, 1  # rounds, and times in them that a slice may be late
NAME_SIZE, MAX_NAMED = 8, 32  # bytes of a peer's id, and how many of them one member may tell


def name_of(peer: PeerID) -> bytes:
    return peer.to_bytes()[-NAME_SIZE:]


def believed(reducers: int, group_size: int) -> float:
    """Times the usual bandwidth that one of so many is believed to have: so much that the load balancing would give it
    MOST of the vector if it alone claimed it, between AT_LEAST and FASTEST.

    With n members and m other reducers of usual bandwidth, one that has F times as much gets the share W for which both
    need as long: 1 + (n - 2) W = F (1 + (n - 2) (1 - W) / m).
    """
    others, more = max(1, reducers - 1), max(0, group_size - 2)
    return min(FASTEST, max(AT_LEAST, (1 + more * MOST) / (1 + more * (1 - MOST) / others)))


def in_proportion(bandwidths: Sequence[float | None], late: Collection[int] = ()) -> list[float | None]:
    """As multiples of what is usual in the group, the median. Nobody reduces nearly everything because it says that it
    can, and least of all whose slice was late before.

    :param late: places of those whom most of the group have seen being late
    """
    known = [bandwidth for bandwidth in bandwidths if bandwidth]
    usual = median_low(known) if known else 1.0
    fastest = believed(sum(bandwidth != 0 for bandwidth in bandwidths), len(bandwidths))
    shares: list[float | None] = []
    for place, bandwidth in enumerate(bandwidths):
        share = None if bandwidth is None else bandwidth / usual
        if share is not None:
            share = 0.0 if share < SLOWEST else 1.0 if 1 / ALIKE <= share <= ALIKE else min(share, fastest)
        if place in late and share != 0:
            share = LATE_COUNTS if share is None else min(share, LATE_COUNTS)
        shares.append(share)
    if not known and late:
        shares = [1.0 if share is None else share for share in shares]  # hivemind's None is the mean of what is known
    return shares


def late_by_most(group: Sequence[PeerID], named: Sequence[Collection[bytes]]) -> frozenset[int]:
    """Places of members whom more than half of the others name as late.

    :param named: by each member, others' names
    """
    votes = {place: 0 for place in range(len(group))}
    for teller, names in enumerate(named):
        for place, peer in enumerate(group):
            votes[place] += place != teller and name_of(peer) in names
    return frozenset(place for place, count in votes.items() if 2 * count > len(group) - 1)


class LateReducers:
    """What one averager has seen of others' slices in the last rounds."""

    def __init__(self):
        self._rounds: deque[frozenset[PeerID]] = deque(maxlen=REMEMBERED)

    def note(self, answered: Mapping[PeerID, float], failed: Iterable[PeerID] = ()) -> None:
        """:param answered: s from the round's beginning to each reducer's last answer"""
        late = set(failed)
        if len(answered) > 1:
            usual = median_low(answered.values())
            late |= {peer for peer, seconds in answered.items() if seconds > LATE * usual + LATE_SECONDS}
        self._rounds.append(frozenset(late))

    @property
    def named(self) -> list[bytes]:
        """Of those who were late more than once."""
        times: dict[PeerID, int] = {}
        for late in self._rounds:
            for peer in late:
                times[peer] = times.get(peer, 0) + 1
        return sorted(name_of(peer) for peer, count in times.items() if count > FORGIVEN)[:MAX_NAMED]
