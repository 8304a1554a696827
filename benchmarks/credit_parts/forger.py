"""A stranger at the DHT who writes receipts in others' names, with a client that checks nothing."""

from __future__ import annotations

from functools import partial

from hivemind.dht import DHT
from hivemind.utils import get_dht_time

from credit_parts.peer import RUN
from tests.somebody import Somebody, store_as
from volunteer_kit.swarm.agreement import BEGINNING
from volunteer_kit.swarm.receipts import Receipt, ReceiptBoard, Reduced, make_receipt, receipts_key


class Forger:
    """Everything it writes gives the first machine a thousand samples."""

    def __init__(self, bootstrap, machines):
        self._bootstrap, self._machines = bootstrap, machines
        self._board = ReceiptBoard(bootstrap.dht, RUN)
        self._dht = DHT(initial_peers=bootstrap.visible_maddrs(), client_mode=True, start=True, startup_timeout=60)
        self._thief, self._nobody = Somebody(), Somebody()
        self._victim = Somebody()
        self._victim.validator = self._thief.validator  # signs with the thief's key what has the victim's name
        self._forged: dict[int, list[Receipt]] = {}
        self.tried = 0

    def forge(self, epoch: int) -> None:
        """In each way, for the round of `epoch` as the swarm's own receipts describe it."""
        true = self._board.fetch([epoch]).get(epoch, [])
        like = true[0] if true else None
        victim = self._machines[-1].peer_id
        write = partial(store_as, stranger=self._dht, to=self._bootstrap.peer_id, key=receipts_key(RUN, epoch))
        for signer, owner, signs in (
            (self._thief, victim, True),  # a machine's name under a key that is not its own
            (self._thief, self._thief.peer_id, True),  # of somebody whom no authority knows
            (self._victim, self._victim.peer_id, True),  # another's subkey, signed by the thief
            (self._nobody, self._nobody.peer_id, False),  # not signed
        ):
            self._write(write, signer, self._receipt(owner, epoch, like), signs)
        late = self._receipt(self._thief.peer_id, epoch, like).copy(update={"time": get_dht_time() + 1e6})
        self._write(write, self._thief, late, True)

    def _write(self, write, signer: Somebody, receipt: Receipt, signs: bool) -> None:
        self.tried += 1
        self._forged.setdefault(receipt.epoch, []).append(receipt)
        write(signer, value=receipt.dict(), sign=signs)

    def _receipt(self, owner, epoch: int, like: Receipt | None) -> Receipt:
        weights = {self._machines[0].peer_id: 1000.0}
        reduced = Reduced(epoch, b"", like.before if like else BEGINNING, (), weights, 1.0)
        forged = make_receipt(owner, reduced, weights, get_dht_time())
        return forged if like is None else forged.copy(update={"round": like.round, "after": like.after})

    def accepted(self) -> int:
        """Forgeries that a reader of the board gets, in the name of a machine that has an account."""
        accounts = {machine.peer_id.to_bytes() for machine in self._machines}
        found = self._board.fetch(self._forged)
        return sum(r in self._forged[epoch] for epoch, those in found.items() for r in those if r.peer_id in accounts)

    def close(self) -> None:
        self._dht.shutdown()
