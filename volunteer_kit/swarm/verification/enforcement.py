"""Read the convictions now and then, and make this peer refuse peers that most of the others have convicted.

This comes before the authority's ban, and works without an authority. A conviction must stand in two looks one after
the other: a look into the DHT may miss some members, and a few must never count as most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from hivemind.p2p import PeerID
from hivemind.utils.logging import get_logger

from volunteer_kit.swarm.net.access.control import Admission
from volunteer_kit.swarm.verification.convictions import LIFETIME, ConvictionBoard, Said, is_convicted, words_of

logger = get_logger(__name__)
LOOK_EVERY = 10.0  # s; two looks and a fetch of the DHT are well within the minute after which all shall honour it
PRESENT_FOR = 120.0  # s that an account counts as taking part after it was last seen; two lifetimes of a record
HELD_FOR = 1800.0  # s that the convicted are refused after the last look in which most convicted them


@dataclass(frozen=True)
class Case:
    """A peer that most others convict.

    :ivar said: of one peer of each account that has a vote
    :ivar others: accounts that take part, without its own
    """

    accused: PeerID
    account: bytes
    said: Said
    others: int

    def in_words(self) -> str:
        return words_of(self.accused, self.said, self.others)


class ConvictionKeeper:
    """A thread in the process that has started the peer.

    :param peers: those that take part, ourselves among them: PeerBoard.fetch
    :param on_convicted: told of each peer once, when it is condemned; of ourselves at the first look, for from then on
        the others do not answer
    :param on_condemned: told when other peers are refused than before
    """

    def __init__(
        self,
        board: ConvictionBoard,
        admission: Admission,
        peers: Callable[[], Iterable[PeerID]],
        *,
        on_convicted: Callable[[Case], None] = lambda case: None,
        on_condemned: Callable[[], None] = lambda: None,
        look_every: float = LOOK_EVERY,
    ):
        self._board, self._admission, self._peers, self._on_convicted = board, admission, peers, on_convicted
        self._on_condemned = on_condemned
        self._own_id = board.dht.peer_id
        self._present: dict[bytes, float] = {}  # account -> when it was last seen, by time.monotonic()
        self._standing: frozenset[PeerID] = frozenset()  # convicted in the last look
        # condemned -> until, by time.monotonic(), and when the newest strike was, DHT time
        self._held: dict[PeerID, tuple[float, float]] = {}
        self._told_ourselves = False
        self._renew_at = time.monotonic() + LIFETIME / 3
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(look_every,), name="convictions", daemon=True)
        self._thread.start()

    @property
    def condemned(self) -> frozenset[PeerID]:
        """Whom this peer refuses for it."""
        return frozenset(self._held)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _run(self, look_every: float) -> None:
        while not self._stop.is_set():
            try:
                self.look()
            except Exception:  # of the DHT; the next look comes
                if not self._stop.is_set():
                    logger.warning("The convictions could not be read", exc_info=True)
            self._stop.wait(look_every)

    def look(self) -> None:
        now = time.monotonic()
        self._board.retry()
        present = self._look_who_is_present(now)
        found = self._board.fetch(lambda accused, signers: self._is_convicted(accused, signers, present))
        standing = {accused: said for accused, said in found.items() if self._is_convicted(accused, said, present)}
        self._hold({peer: said for peer, said in standing.items() if peer in self._standing}, present, now)
        self._look_for_ourselves(standing, present)
        self._standing = frozenset(standing)
        if now >= self._renew_at:
            self._renew_at = now + LIFETIME / 3
            self._board.renew()

    def _look_who_is_present(self, now: float) -> frozenset[bytes]:
        for peer in self._peers():
            account = self._admission.account_of(peer)
            if account is not None:
                self._present[account] = now
        self._present = {account: seen for account, seen in self._present.items() if now - seen <= PRESENT_FOR}
        return frozenset(self._present)

    def _is_convicted(self, accused: PeerID, signers: Collection[PeerID], present: frozenset[bytes]) -> bool:
        accounts = {self._admission.account_of(signer) for signer in signers} - {None}
        account = self._admission.account_of(accused)
        if not is_convicted(account or b"", accounts, present):
            return False
        if account is None:  # only now: a few can name any number of peers that do not exist
            self._admission.believes(accused)  # its token is looked for, and we look again
            return False
        # who holds the run's keys is the host's to look after; all monitors are one account
        return self._admission.is_open or self._admission.role_of(accused) not in ("host", "monitor")

    def _hold(self, decided: Mapping[PeerID, Said], present: frozenset[bytes], now: float) -> None:
        before = self._held
        held = {
            peer: (until, newest)
            for peer, (until, newest) in before.items()
            if until > now and newest > self._admission.pardoned_at(peer)
        }
        for peer, said in decided.items():
            if peer != self._own_id:
                held[peer] = now + HELD_FOR, max(strike.at for strikes in said.values() for strike in strikes)
        self._held = held
        self._admission.condemn(held)
        if held.keys() != before.keys():
            self._on_condemned()
        for peer in held.keys() - before.keys():
            self._tell(peer, decided[peer], present)

    def _look_for_ourselves(self, standing: Mapping[PeerID, Said], present: frozenset[bytes]) -> None:
        if self._own_id not in standing:
            self._told_ourselves = False
        elif not self._told_ourselves:
            self._told_ourselves = True
            self._tell(self._own_id, standing[self._own_id], present)

    def _tell(self, peer: PeerID, said: Said, present: frozenset[bytes]) -> None:
        account = self._admission.account_of(peer)
        by_account = {self._admission.account_of(signer): signer for signer in sorted(said, key=PeerID.to_bytes)}
        votes = {signer: said[signer] for one, signer in by_account.items() if one in present and one != account}
        case = Case(peer, account, votes, len(present - {account}))
        logger.warning(f"{peer} is refused from now on: {case.in_words()}")
        self._on_convicted(case)
