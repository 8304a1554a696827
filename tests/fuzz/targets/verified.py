"""Words of a verified round: what members commit to, reveal and state, and the messages around it."""

from __future__ import annotations

import numpy as np

from tests.fuzz.forms import MSGPACK
from tests.fuzz.target import Registry
from volunteer_kit.robust.messages import Accusation, Commit, Report, Reveal, Samples, Statement, Vote
from volunteer_kit.robust.reducing import SUMS
from volunteer_kit.swarm.node.verified_words import (
    AskListed,
    Lacking,
    Listed,
    Sealed,
    Stage,
    Word,
    commit_body,
    packed,
    read_commit,
    read_reveal,
    read_statement,
    reveal_body,
    statement_body,
    unpacked,
)
from volunteer_kit.swarm.rounds.commitments import DIGEST
from volunteer_kit.swarm.sync.contributions import Share
from volunteer_kit.swarm.wire import WireError

registry = Registry()
CELLS, EPOCH, STALENESS, SUM = 4, 7, 4, 8
ROUND = b"r" * 32
SHARES = (Share("a", 3, 6, 8, 0b1111), Share("a", 4, 7, 16, 0b0101))
NEWS = (
    Report(ROUND, 1, 0, np.arange(CELLS * SUM, dtype=np.float64)),
    Accusation(ROUND, 2, 3),
    Vote(ROUND, 1, "gradient", True, float("inf"), frozenset({2}), -1),
)
COMMIT = Commit(
    24.0, b"s" * 16, b"p" * DIGEST * CELLS, b"n" * 16, frozenset({1}), frozenset(), frozenset({0}), NEWS, ROUND,
    (b"", b"h" * 8),
)  # fmt: skip
LENGTHS = (1.0, 0.0, 2.5, 3.0)  # of its cells
NUMBERS = np.arange(CELLS * (SUMS + SUM), dtype=np.float32).reshape(CELLS, SUMS + SUM)
SEALED = Sealed(ROUND, int(Stage.COMMIT), "a", b"words", b"s" * 64, b"k" * 64)
SAID = (Word(SEALED), Listed(ROUND, 0, 1, (SEALED, SEALED)), AskListed(ROUND), Lacking(ROUND, 1, ("a", "b")))


@registry.add(lambda: [packed(said)[1:] for said in SAID], WireError, form=MSGPACK)
def verified_message(data: bytes) -> bool:
    """Decode a message around a verified round, behind its mark."""
    unpacked(data)
    return True


@registry.add(lambda: [commit_body(COMMIT, SHARES, LENGTHS)[0]], WireError, form=MSGPACK)
def verified_commitment(data: bytes) -> bool:
    """Read what a member commits to before any part travels."""
    commit, shares, lengths = read_commit("a", data, EPOCH, STALENESS, CELLS)
    assert len(lengths) == CELLS and commit.weight == sum(share.samples for share in shares)
    return True


@registry.add(
    lambda: [reveal_body(Reveal(b"n" * 16, (b"a", b""), (2, 0), (b"h" * 8, b"")))], WireError, form=MSGPACK
)
def verified_reveal(data: bytes) -> bool:
    """Read what a member reveals when the round is over."""
    read_reveal(data, (b"a", b""), (2, 0))
    return True


@registry.add(
    lambda: [statement_body(Statement(b"z" * 32, NUMBERS, (b"h" * 8,), Samples(("0/1/2", "0/1/3"), microbatches=2)))],
    WireError,
    form=MSGPACK,
)
def verified_statement(data: bytes) -> bool:
    """Read a member's statement of what it got from each of the others."""
    said = read_statement(data, CELLS, SUM)
    assert said.numbers.shape == NUMBERS.shape
    return True
