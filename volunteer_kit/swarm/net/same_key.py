"""Notice one key on two machines: a cloned machine, a copied folder, a container's image with a key in it.

Both are the same peer to all others. Each reads its own records only, so they never meet, and each believes that it
trains alone. So each program that runs under a key signs a record of itself under the key's own name, and reads that
place before it writes: a record that it has not written is another program's. A stranger cannot write there, for
the key signs each record, and its expiration too: an old one cannot be shown again.
"""

from __future__ import annotations

import enum
import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, NamedTuple

from hivemind.dht import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time

LIFETIME = 60.0  # s that a record stays
ID_SIZE = 8  # bytes
SKEW = 8.0  # s; clocks may differ by 3 each way, and a program that has just ended may have written in its last second
REMEMBERED = 64  # of our own records, more than LIFETIME has
LOOK_EVERY = 15.0  # s
HOW_COME = "a folder was copied, or a machine cloned"


class Instance(NamedTuple):
    """One program that runs under a key."""

    id: bytes  # drawn at its start
    started: float  # DHT time
    written: float  # DHT time of this record


class Sharing(enum.Enum):
    """How a program stands to others that run under its key."""

    ALONE = "alone"
    FIRST = "first"  # another one came later
    LATER = "later"  # another one was here before
    CLONED = "cloned"  # the machine was cloned while the program ran: neither was here before the other

    @property
    def must_yield(self) -> bool:
        """Where another key serves as well, this program takes one."""
        return self in (Sharing.LATER, Sharing.CLONED)


def judge(own: Instance, found: Instance | None, wrote: Collection[float], skew: float = SKEW) -> Sharing:
    """:param found: what stands under the key
    :param wrote: `written` of our own records
    :param skew: s by which clocks, and the end of a program, may differ"""
    if found is None or (found.id == own.id and found.written in wrote):
        return Sharing.ALONE
    if found.id == own.id:
        return Sharing.CLONED
    if found.written > own.written + SKEW:  # dated by a clock that was wrong, ours perhaps before we began afresh
        return Sharing.ALONE
    if found.written <= own.started + skew:  # it ended when we began: the program before us on this machine
        return Sharing.ALONE
    return Sharing.FIRST if (own.started, own.id) < (found.started, found.id) else Sharing.LATER


def read_instance(value: Any) -> Instance | None:
    """What a record says; None for what is none."""
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        return None
    name, started, written = value
    if not isinstance(name, bytes) or len(name) != ID_SIZE or type(started) is not float or type(written) is not float:
        return None
    return Instance(name, started, written)


def find_instance(dht: DHT, run_id: str, peer_id: PeerID, owner: bytes) -> Instance | None:
    """The record that stands under a key; waits for the DHT.

    :param owner: the key's public half, as names of signed records have it
    """
    found = dht.get(_name(run_id, peer_id), latest=True)
    entries = found.value if found is not None and isinstance(found.value, dict) else {}
    entry = entries.get(owner)
    return read_instance(entry.value) if isinstance(entry, ValueWithExpiration) else None


def _name(run_id: str, peer_id: PeerID) -> str:
    return f"same_key.{run_id}.{peer_id}"


class KeyWatch:
    """Tells others under this peer's key that we are here, and finds out whether there are any.

    :param dht: whose records are signed with the key, and checked (PeerBoard adds that)
    :param skew: as of `judge`
    """

    def __init__(self, dht: DHT, run_id: str, peer_id: PeerID, skew: float = SKEW):
        self._skew = skew
        self._dht, self._run_id, self._peer_id = dht, run_id, peer_id
        self._subkey = RSASignatureValidator().local_public_key
        self._id, self._started = secrets.token_bytes(ID_SIZE), get_dht_time()
        self._wrote: deque[float] = deque(maxlen=REMEMBERED)
        self._misdated: Instance | None = None  # by a clock that was wrong; it stands until its date

    def look(self) -> Sharing:
        """Waits for the DHT. To be called several times in LIFETIME."""
        standing = find_instance(self._dht, self._run_id, self._peer_id, self._subkey)
        now = get_dht_time()
        own = Instance(self._id, self._started, now)
        if standing is not None and standing.written > now + SKEW:
            self._misdated = standing
        is_old = standing is not None and standing == self._misdated
        sharing = Sharing.ALONE if is_old else judge(own, standing, self._wrote, self._skew)
        self._wrote.append(now)
        self._dht.store(_name(self._run_id, self._peer_id), [*own], now + LIFETIME, subkey=self._subkey)
        return sharing


CLONED = "This machine was cloned while it ran: another one takes part under the same key."
# A run's first peer is known by its peer id, so it can take no other key: the later one of two ends. Where neither is
# the later one both go on, or nobody could join until somebody looks.
OF_FIRST_PEERS = {
    Sharing.FIRST: (
        f"Another machine has a first peer of this run under the key of this one: {HOW_COME}. It came later, and ends; "
        "nothing has to be done here."
    ),
    Sharing.LATER: (
        f"Another machine has a first peer of this run under the key of this one, and was here before: {HOW_COME}. "
        "Volunteers know the run by that key, and would reach now one and now the other, so this one ends.\n"
        "1. If the other one shall go on, nothing has to be done.\n"
        "2. If this machine shall take its place, end the other one first; then give the same command here again.\n"
        "3. For a run of its own, with other keys and another run_id: volunteer-kit host init"
    ),
    Sharing.CLONED: (
        "This machine was cloned while it ran: another one has a first peer of this run under the key of this one. "
        "Volunteers reach now one and now the other.\n"
        "1. End one of the two."
    ),
}


class TwinWatch:
    """A thread that looks for other programs under this peer's key every LOOK_EVERY s, the first time at once.

    :param tell: gets each that is not ALONE, once; called in the thread
    :param may_look: False: not now, for this machine's clock is wrong, and a record that it dates would stand as long
        as it is ahead
    """

    def __init__(
        self,
        key: KeyWatch,
        tell: Callable[[Sharing], None],
        may_look: Callable[[], bool] = lambda: True,
        every: float = LOOK_EVERY,
    ):
        self._key, self._tell, self._may_look, self._every = key, tell, may_look, every
        self._told = {Sharing.ALONE}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="same key", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Before the DHT ends."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stop.is_set():
            sharing = Sharing.ALONE
            with suppress(Exception):  # of the DHT; the next look comes
                sharing = self._key.look() if self._may_look() else sharing
            if sharing not in self._told:
                self._told.add(sharing)
                self._tell(sharing)
            self._stop.wait(self._every)
