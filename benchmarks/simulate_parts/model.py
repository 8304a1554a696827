"""The cost model: what simulate.py's docstring says, in numpy, for groups of thousands."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.simulate_parts.balance import shares, whole_parts
from volunteer_kit.swarm.shares import in_proportion

MBIT = 125_000.0  # bytes
LARGEST_REFRESH = 10.0  # s between looks at the others' progress; swarm/options.py
MOST_TALK = 0.5  # of a line: beyond that looks at the others' progress take turns with parts, and come later
ASKED = 20  # nodes of the DHT that one look, or one report, goes to; hivemind's bucket
REPORT, RECORDS = 0.25, 3.0  # s between two reports of one's own progress, at least; records that one costs each node
HANDSHAKES = 3.0  # round trips before a stream carries its first part


@dataclass(frozen=True)
class Codec:
    """Bytes a value in a part, one way and the other; and how many times as long as blockwise8 a core works on one."""

    sent: float
    answered: float
    encode: float = 1.0
    decode: float = 1.0


# Bytes of parts of 2^19 normal values. Work: 3 ns for what every value costs (summing, copies) and what it took to
# encode or decode one, thread time on one core of the bench; relative to blockwise8's 4 ns
CODECS = {
    "none": Codec(4.0, 4.0, 1.3, 0.9),
    "float16": Codec(2.0, 2.0, 0.9, 0.8),
    "uniform8": Codec(1.002, 1.002, 3.0, 1.5),
    "blockwise8": Codec(1.004, 1.004),
    "uniform4": Codec(0.5002, 0.5002, 2.0, 1.5),
    "blockwise4": Codec(0.5157, 0.5157, 1.1, 1.1),
    "sparse": Codec(0.0154, 0.0154, 4.9, 1.0),
}


@dataclass(frozen=True)
class Constants:
    """What arithmetic does not give; fitted on measurements.

    :param header: bytes on a line for each byte of parts: Ethernet, IP, TCP, encryption, acknowledgements
    :param record: bytes of one member's progress, as one node of the DHT tells it to another
    :param meeting: s from an epoch's end until a group of two has met; `meeting_more`: s for each doubling of it
    :param late: s from the first member that sees the epoch's end to the last one; the others exchange meanwhile
    :param value_seconds: s of a core for each value that is encoded, reduced or decoded, by blockwise8
    :param pause: s that a device computes nothing in each epoch, whatever the network does: the step itself
    """

    header: float = 1.08
    record: float = 2000.0
    meeting: float = 0.3
    meeting_more: float = 0.1
    late: float = 0.8
    value_seconds: float = 5e-9
    pause: float = 0.1


@dataclass(frozen=True)
class Swarm:
    """:param down: (n,) Mbit/s; `up`: likewise
    :param speed: (n,) samples/s that each device computes
    :param target_batch_size: samples of an epoch, swarm-wide
    :param codec: of gradients, both ways
    :param parts: (P,) values of each part, as hivemind cuts the tensors
    :param part_bytes: (P,) bytes of each, one way; None: by the codec
    :param client: (n,) who reduces nothing; None: nobody
    :param rtt: ms of each line, to the middle and back
    :param delayed: average in the background
    :param matchmaking: s, of the run file
    :param microbatch: s after which a device reports what it has
    :param cores: that all members together have; None: each has one of its own
    :param leaves_per_hour: how often one member leaves, or dies
    :param epochs_lost: of a member's computing, each time
    :param even: parts are divisible, and slices exactly as large as they should be
    """

    down: np.ndarray
    up: np.ndarray
    speed: np.ndarray
    target_batch_size: float
    codec: Codec
    parts: np.ndarray
    part_bytes: np.ndarray | None = None
    client: np.ndarray | None = None
    rtt: float = 0.0
    delayed: bool = True
    matchmaking: float = 15.0
    microbatch: float = 4.0
    cores: float | None = None
    leaves_per_hour: float = 0.0
    epochs_lost: float = 1.0
    even: bool = False

    @property
    def size(self) -> int:
        return len(self.up)

    @property
    def epoch(self) -> float:
        """s in which all devices together compute a target batch."""
        return self.target_batch_size / float(np.sum(self.speed))

    def talk(self, record: float) -> tuple[np.ndarray, np.ndarray]:
        """Mbit/s that each member's line carries, each way, so that all know how far the others are, (n,): while it
        computes, and reports after each microbatch; and while it waits, and only looks at the others' reports."""
        refresh = min(LARGEST_REFRESH, self.matchmaking / 2)  # s between looks
        asked, most = min(ASKED, self.size - 1), MOST_TALK * np.minimum(self.up, self.down)
        looks, reports = self.size / refresh, RECORDS / max(REPORT, self.microbatch)  # records a second
        computing, waiting = record * asked * (looks + reports) / MBIT, record * asked * looks / MBIT
        return np.minimum(computing, most), np.minimum(waiting, most)


@dataclass(frozen=True)
class Prediction:
    """s, Mbit/s, bytes. `round`: from an epoch's end to the last answer; `wall`: from one step to the next."""

    meeting: float
    exchange: float
    work: float
    round: float
    epoch: float
    wall: float
    goodput: float
    bytes_per_sample: float
    mbps: float
    reducers: int


def predict(swarm: Swarm, constants: Constants) -> Prediction:
    n = swarm.size
    values, sent, answered, parts = slices(swarm)
    reducers = int((parts > 0).sum())
    talk, talk_waiting = swarm.talk(constants.record)
    own, alone = values.sum() - values, n <= 1
    sends = (sent.sum() - sent) * constants.header  # bytes (n,)
    hears = (n - 1) * sent * constants.header
    answers = (n - 1) * answered * constants.header
    learns = (answered.sum() - answered) * constants.header
    beside = talk if swarm.delayed else talk_waiting
    up, down = MBIT * (swarm.up - beside), MBIT * (swarm.down - beside)  # bytes/s (n,)
    busiest = max(((sends + answers) / up).max(), ((hears + learns) / down).max())
    # a part is answered when its last sender has sent it; of a slice in one part, all answers come after all senders
    last = np.divide(answers, parts, out=np.zeros(n), where=parts > 0)
    one_after_other = max((sends / up).max(), (hears / down).max()) + max((last / up).max(), (last / n / down).max())
    exchange = 0.0 if alone else max(busiest, one_after_other) + HANDSHAKES * 2 * swarm.rtt / 1000
    # encoded once by its sender, decoded and summed by its reducer, encoded once for all, decoded by each
    encoded, decoded = own + values, own + (n - 1) * values  # (n,)
    handled = swarm.codec.encode * encoded + swarm.codec.decode * decoded
    work = (
        0.0
        if alone
        else constants.value_seconds * float(handled.max() if swarm.cores is None else handled.sum() / swarm.cores)
    )
    meeting = 0.0 if alone else constants.meeting + constants.meeting_more * np.log2(n / 2)
    seconds = meeting + max(exchange, 0.0 if alone else constants.late) + work
    wall = swarm.epoch + constants.pause + max(0.0, seconds - (swarm.epoch if swarm.delayed else 0.0))
    kept = max(0.0, 1 - swarm.leaves_per_hour / 3600 * (swarm.epochs_lost * wall))
    total = float((sends + answers).sum()) + MBIT * float(
        (talk * swarm.epoch + talk_waiting * (wall - swarm.epoch)).sum()
    )
    return Prediction(
        meeting=float(meeting),
        exchange=float(exchange),
        work=float(work),
        round=float(seconds),
        epoch=float(swarm.epoch),
        wall=float(wall),
        goodput=float(kept * swarm.epoch / wall),
        bytes_per_sample=float(total / max(1e-9, kept * swarm.target_batch_size)),
        mbps=float(total / n / wall / MBIT),
        reducers=reducers,
    )


def slices(swarm: Swarm) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of each member's slice: values, bytes of them as sent and as answered, parts; each (n,)."""
    n = swarm.size
    reduces = np.ones(n, bool) if swarm.client is None else ~swarm.client
    told = in_proportion(np.where(reduces, swarm.up, 0.0).tolist())
    share = shares(np.array(told, dtype=float))
    size = swarm.parts * swarm.codec.sent if swarm.part_bytes is None else swarm.part_bytes  # (P,)
    back = size * swarm.codec.answered / swarm.codec.sent
    if swarm.even:
        per_member = np.where(share > 0, len(swarm.parts) * share, 0.0)
        return share * swarm.parts.sum(), share * size.sum(), share * back.sum(), np.maximum(per_member, share > 0)
    owner = whole_parts(share, swarm.parts)
    return tuple(np.bincount(owner, what, n) for what in (swarm.parts, size, back, np.ones(len(owner))))


def cut(numel: int, part: int) -> np.ndarray:
    """Values of the parts of one tensor."""
    whole, rest = divmod(numel, part)
    return np.array([part] * whole + [rest] * (rest > 0))
