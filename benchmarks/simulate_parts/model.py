"""The cost model: what simulate.py's docstring says, in numpy, for groups of thousands."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from volunteer_kit.swarm.sync.leading import MOST_BANDWIDTH, share_out

MBIT = 125_000.0  # bytes
CELLS = 16  # that a vector is cut into; sync/config.py
MOST_TALK = 0.5  # of a line: messages beyond that take turns with parts
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
    :param record: bytes a second that a member sends beside parts and answers: messages, heartbeats, DHT
    :param meeting: s from an epoch's end until a group of two has begun its round, and from its end until a majority
        has voted; `meeting_more`: s for each doubling of it
    :param late: s from the first member that hears of the round to the last one; the others exchange meanwhile
    :param value_seconds: s of a core for each value that is encoded, reduced or decoded, by blockwise8
    :param pause: s that a device computes nothing in each epoch, whatever the network does: the step itself
    """

    header: float = 1.08
    record: float = 8000.0
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
    :param parts: (P,) values of each cell
    :param part_bytes: (P,) bytes of each, one way; None: by the codec
    :param client: (n,) who reduces nothing; None: nobody
    :param rtt: ms of each line, to the middle and back
    :param delayed: average in the background
    :param cores: that all members together have; None: each has one of its own
    :param leaves_per_hour: how often one member leaves, or dies
    :param epochs_lost: of a member's computing, each time
    :param even: cells are divisible, and slices exactly as large as they should be
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

    def talk(self, record: float) -> np.ndarray:
        """Mbit/s of messages on each member's line, each way, (n,)."""
        sent = record / MBIT if self.size > 1 else 0.0
        return np.minimum(sent, MOST_TALK * np.minimum(self.up, self.down))


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
    talk = swarm.talk(constants.record)
    own, alone = values.sum() - values, n <= 1
    sends = (sent.sum() - sent) * constants.header  # bytes (n,)
    hears = (n - 1) * sent * constants.header
    answers = (n - 1) * answered * constants.header
    learns = (answered.sum() - answered) * constants.header
    up, down = MBIT * (swarm.up - talk), MBIT * (swarm.down - talk)  # bytes/s (n,)
    busiest = max(((sends + answers) / up).max(), ((hears + learns) / down).max())
    # a slice is answered when its last sender has sent it
    one_after_other = max((sends / up).max(), (hears / down).max()) + max((answers / up).max(), (learns / down).max())
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
    total = float((sends + answers).sum()) + MBIT * float(talk.sum()) * wall
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
    """Return for each member's slice: values, bytes of them as sent and as answered, cells; each (n,)."""
    reduces = np.ones(swarm.size, bool) if swarm.client is None else ~swarm.client
    size = swarm.parts * swarm.codec.sent if swarm.part_bytes is None else swarm.part_bytes  # (P,)
    back = size * swarm.codec.answered / swarm.codec.sent
    if swarm.even:
        carried = np.where(reduces, np.minimum(swarm.up, MOST_BANDWIDTH * np.median(swarm.up[reduces])), 0.0)
        share = carried / carried.sum()
        return share * swarm.parts.sum(), share * size.sum(), share * back.sum(), len(swarm.parts) * share
    reducers = [(str(place), float(swarm.up[place])) for place in np.flatnonzero(reduces)]
    found = np.zeros((4, swarm.size))
    for name, cells in share_out(len(swarm.parts), reducers, reducers[0][0]):
        mine = [cell for cell in range(len(swarm.parts)) if cells >> cell & 1]
        found[:, int(name)] = swarm.parts[mine].sum(), size[mine].sum(), back[mine].sum(), len(mine)
    return found[0], found[1], found[2], found[3]


def cut(numel: int, cells: int = CELLS) -> np.ndarray:
    """Values of each cell of a vector."""
    return np.diff(np.arange(cells + 1) * numel // cells)
