"""Receipts that peers of a made-up swarm sign."""

from __future__ import annotations

from functools import partial

from hivemind.p2p import PeerID

from volunteer_kit.swarm.agreement import BEGINNING
from volunteer_kit.swarm.receipts import ENTRY, Receipt, digest_of

NOW = 1_800_000_000.0


def peer_of(name: str) -> PeerID:
    """ "a" and "a2" are machines of account "A"."""
    return PeerID(name.ljust(34, "-").encode())


NAMES = [*"abcdefghm", "a2", "b2"]
NAME_OF = {digest_of(peer_of(name)): name for name in NAMES}
PEER_NAME = {peer_of(name): name for name in NAMES}


def owner(digest: bytes) -> bytes | None:
    name = NAME_OF.get(digest)
    return name[0].upper().encode() if name else None


def account_of(peer: PeerID) -> bytes | None:
    return owner(digest_of(peer))


def is_monitor(peer: PeerID) -> bool:
    return peer == peer_of("m")


def signed(signer: str, epoch: int = 1, line: str = "x", *, since: str | None = None, at: float | None = None, **named):
    """A receipt of the round that made LINE at EPOCH of the LINE (or `since`) that was at the epoch before."""
    entries = sorted((digest_of(peer_of(name)), samples) for name, samples in named.items())
    before = BEGINNING if epoch == 1 else lineage(since or line, epoch - 1)
    return Receipt(
        peer_id=peer_of(signer).to_bytes(),
        epoch=epoch,
        round=lineage("R" + line, epoch),
        before=before,
        after=lineage(line, epoch),
        time=NOW + 10.0 * epoch if at is None else NOW + at,
        senders=b"".join(ENTRY.pack(*entry) for entry in entries),
    )


def lineage(line: str, epoch: int) -> bytes:
    return f"{line}{epoch}".ljust(8, "-").encode()


def made(epochs, line: str, signers: str, **more) -> list[Receipt]:
    return [signed(s, epoch, line, a=1, b=2, **more) for epoch in epochs for s in signers.split()]


X = partial(made, line="x", signers="a b c d")
