"""Check that the log of a state that came from another peer is the run's."""

from __future__ import annotations

from volunteer_kit.swarm.node.access import Access, Proof
from volunteer_kit.swarm.node.signatures import MOST_EXPORTED, Signatures
from volunteer_kit.swarm.sync.messages import Snapshot
from volunteer_kit.swarm.wire import decode


def read_proof(data: bytes) -> Proof:
    """Raises WireError."""
    proof: Proof = decode(Proof, data, 2 * MOST_EXPORTED)
    return proof


def why_not_proven(snapshot: Snapshot, proof: Proof, access: Access, signatures: Signatures) -> str | None:
    """Why a snapshot's log is not believed; None: it is.

    :param signatures: the book that remembers those of the log
    """
    items = snapshot.items
    if not items:
        return "it has no log"
    return (
        access.why_not_begun(items[0], proof.founder)
        or access.why_not_theirs(items[-1].membership.view.values())
        or signatures.load(proof.signatures)
        or signatures.check_items(items)
    )
