"""Words of verified rounds as bytes: what strangers send is bounded, and makes sense or is nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.fuzz.targets.verified import CELLS, COMMIT, EPOCH, LENGTHS, NEWS, NUMBERS, ROUND, SHARES, STALENESS, SUM
from tests.node_world import RUN, key
from volunteer_kit.robust.messages import Commit, Reveal, Samples, Statement, Vote
from volunteer_kit.swarm.node.signatures import Signatures, peer_id_of, public_der
from volunteer_kit.swarm.node.verified_words import (
    MARK,
    MOST_NEWS_BYTES,
    AskListed,
    Lacking,
    Listed,
    Sealed,
    Stage,
    Word,
    commit_body,
    digest_of_list,
    packed,
    pieces_of,
    read_commit,
    read_reveal,
    read_statement,
    reveal_body,
    statement_body,
    unpacked,
)
from volunteer_kit.swarm.wire import WireError


def read(body: bytes, author: str = "a"):
    return read_commit(author, body, EPOCH, STALENESS, CELLS)


def body_of(commit: Commit = COMMIT, shares=SHARES, lengths=LENGTHS) -> bytes:
    return commit_body(commit, shares, lengths)[0]


def test_a_commitment_comes_back_with_the_weights_of_its_shares():
    commit, shares, lengths = read(body_of())
    assert (shares, lengths) == (SHARES, LENGTHS)
    assert commit.weight == 24 and [load.factor for load in commit.loads] == [0.5, 1.0]
    assert [commit.weight_of(cell) for cell in range(CELLS)] == [20.0, 4.0, 20.0, 4.0]
    assert (commit.distrusts, commit.due) == (frozenset({1}), frozenset({0}))
    assert (commit.of, commit.stated) == (ROUND, COMMIT.stated)
    report, accusation, vote = commit.news
    assert np.array_equal(report.total, NEWS[0].total) and (accusation, vote) == NEWS[1:]
    assert read(body_of(replace(COMMIT, distrusts=None)))[0].distrusts is None


@pytest.mark.parametrize(
    "changed",
    [
        {"shares": (SHARES[0]._replace(peer="b"),)},
        {"shares": (SHARES[0], SHARES[0])},
        {"shares": (SHARES[0]._replace(samples=0),)},
        {"shares": (SHARES[0]._replace(samples=2**21),)},
        {"shares": (SHARES[0]._replace(cells=0),)},
        {"shares": (SHARES[0]._replace(cells=1 << CELLS),)},
        {"shares": (SHARES[0]._replace(birth=EPOCH + 1),)},
        {"shares": (SHARES[0]._replace(birth=EPOCH - STALENESS - 1),)},
        {"shares": tuple(SHARES[0]._replace(number=number) for number in range(1025))},
        {"lengths": LENGTHS[:3]},
        {"lengths": (-1.0, *LENGTHS[1:])},
        {"commit": replace(COMMIT, parts=COMMIT.parts[1:])},
        {"commit": replace(COMMIT, nonce=b"short")},
        {"commit": replace(COMMIT, bans=frozenset({10**6}))},
        {"commit": replace(COMMIT, stated=(b"of another length",))},
        {"commit": replace(COMMIT, of=b"x" * 65)},
        {"commit": replace(COMMIT, news=(Vote(ROUND, 1, "spite", True),))},
        {"commit": replace(COMMIT, news=(Vote(b"x" * 65, 1, "gradient", True),))},
    ],
)
def test_what_nobody_honest_commits_to_is_refused(changed):
    with pytest.raises(WireError):
        read(body_of(**changed))


def test_news_that_find_no_room_come_with_the_next_commitment():
    many = tuple(replace(NEWS[0], part=part) for part in range(500))
    body, left = commit_body(replace(COMMIT, news=many), SHARES, LENGTHS)
    assert 0 < len(left) < 500 and len(body) < 2 * MOST_NEWS_BYTES
    assert (*(each.part for each in read(body)[0].news), *(each.part for each in left)) == tuple(range(500))


def test_reveals_and_statements_come_back():
    reveal = Reveal(b"n" * 16, (b"a", b""), (2, 0), (b"h" * 8, b""))
    assert read_reveal(reveal_body(reveal), (b"a", b""), (2, 0)) == reveal
    said = Statement(b"z" * 32, NUMBERS, (b"h" * 8,), Samples(("0/1/2", "0/1/3"), microbatches=2))
    found = read_statement(statement_body(said), CELLS, SUM)
    assert (found.seed, found.heard, found.opening) == (said.seed, said.heard, said.opening)
    assert np.array_equal(found.numbers, NUMBERS)
    with pytest.raises(WireError):
        read_statement(statement_body(replace(said, numbers=NUMBERS[1:])), CELLS, SUM)
    with pytest.raises(WireError):
        statement_body(replace(said, opening=Samples(tuple(f"{n:0200d}" for n in range(6000)))))


def sealed(author: str = "a", body: bytes = b"words") -> Sealed:
    return Sealed(ROUND, int(Stage.COMMIT), author, body, b"s" * 256, b"k" * 294)


@pytest.mark.parametrize(
    "said",
    [Word(sealed()), Listed(ROUND, 0, 1, (sealed(), sealed("b"))), AskListed(ROUND), Lacking(ROUND, 1, ("a", "b"))],
)
def test_messages_come_back(said):
    data = packed(said)
    assert data[:1] == MARK and unpacked(data[1:]) == said


def test_a_long_list_comes_in_pieces_and_names_everybodys_words():
    many = [sealed(f"peer {n}", bytes([n % 256]) * 4000) for n in range(400)]
    pieces = pieces_of(ROUND, many)
    assert len(pieces) > 1 and [each.piece for each in pieces] == list(range(len(pieces)))
    assert [one for each in pieces for one in each.sealed] == many
    for each in pieces:
        packed(each)
    assert digest_of_list(many) == digest_of_list(many[::-1]) != digest_of_list(many[1:])
    assert digest_of_list([sealed(body=b"other words")]) != digest_of_list([sealed()])


def test_junk_is_no_message():
    dice = random.Random(5)
    whole = [packed(Listed(ROUND, 0, 1, (sealed(),)))[1:], body_of()]
    for _ in range(3000):
        data = bytearray(dice.choice(whole))
        for _ in range(dice.randrange(1, 6)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        for decoder in (unpacked, read, lambda d: read_statement(d, CELLS, SUM), lambda d: read_reveal(d, (), ())):
            try:
                decoder(bytes(data[: dice.randrange(len(data) + 1)]) if dice.random() < 0.3 else bytes(data))
            except WireError:
                pass


def test_words_hold_for_their_author_round_and_stage_alone():
    books = [Signatures(key(place), peer_id_of(public_der(key(place))), RUN) for place in range(2)]
    one, other = books
    signature = one.sign_words(ROUND, 1, b"words")
    about = (one.peer_id, ROUND, 1, b"words", signature, one.credential)
    assert other.check_words(*about)
    for place, wrong in ((0, other.peer_id), (1, b"q" * 32), (2, 2), (3, b"others"), (4, b"s" * 64), (5, b"no key")):
        assert not other.check_words(*about[:place], wrong, *about[place + 1 :])
    elsewhere = Signatures(key(1), other.peer_id, "another run")
    assert not elsewhere.check_words(*about)
