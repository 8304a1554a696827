"""A node's store: what survives kill -9, a damaged file, another identity."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import sqlite3
from contextlib import closing

import pytest

from volunteer_kit.storage import locks
from volunteer_kit.swarm.node import store as module
from volunteer_kit.swarm.node.store import NodeStore, StoreError
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.certificates import Certificate, Goodbye
from volunteer_kit.swarm.sync.contributions import Accounts, Answer, Cause, Contribution, LedgerRecord, Settled, Share
from volunteer_kit.swarm.sync.entries import Entry, Member, Opening
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import BallotRecord, Durable, HeadRecord, OpeningRecord, Snapshot

ELEMENTS = 1000
GROUP = tuple(Member(name, name, True) for name in "abc")
FORK = multiprocessing.get_context("fork")


def log_of(length: int, parent: LogItem | None = None, voters: str = "abc") -> tuple[LogItem, ...]:
    """A log of so many items."""
    items = [parent or LogItem.genesis(GROUP)]
    while len(items) < length:
        head = items[-1].head
        answers = (Answer(3, "a", bytes([head.epoch] * 32), (Share("a", head.epoch, head.epoch, 5, 3),)),)
        entry = Entry(0, 0, head.epoch, head.lineage, Ballot(0, "a"), b"round" + voters.encode(), GROUP, answers, 0)
        items.append(items[-1].after_entry(entry, Certificate(entry.lineage, Ballot(0, "a"), frozenset(voters))))
    return tuple(items)


def snapshot_of(items: tuple[LogItem, ...]) -> Snapshot:
    accounts = Accounts()
    for item in items:
        if isinstance(item.step, Entry):
            accounts = accounts.after(item.step.answers, item.head.epoch, 4)
    return Snapshot(items, accounts)


def ledger_of(number: int) -> LedgerRecord:
    live = (Contribution(number, 3, 8, 1, 2, True),)
    counted = ((b"lineage", (Settled(0, 8, 3),)),)
    return LedgerRecord(live, number + 1, 80, 16, ((Cause.STALE, 4),), (), counted, b"slot", (b"round",))


def now_and_later(store: NodeStore, opened):
    """The store, and the one that a restart opens."""
    yield store
    yield opened()


def head_of(length: int) -> HeadRecord:
    return HeadRecord(snapshot_of(log_of(length)))


def hashed(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@pytest.fixture
def opened(tmp_path):
    """Opens the store of a folder; the one that was open before is closed."""
    last: list[NodeStore] = []

    def open_store(elements: int = ELEMENTS) -> NodeStore:
        if last:
            last.pop().close()
        last.append(NodeStore(tmp_path / "node", elements))
        return last[0]

    yield open_store
    if last:
        last.pop().close()


# --- records ---


def test_a_new_store_is_empty(opened):
    store = opened()
    assert store.durable() == Durable()
    assert store.slot_table() == {} and store.names(3) == () and store.signatures == b"" and store.meta("a") is None
    assert store.goodbye is None and store.newest_state() is None
    assert store.trouble is None and not store.rebooted


def test_what_is_written_is_there_after_a_restart(opened):
    entry = log_of(2)[-1].step
    records = (
        head_of(5),
        BallotRecord(b"slot", Ballot(2, "b"), entry, Ballot(1, "a"), Ballot(0, "c")),
        OpeningRecord(Opening(0, 0, 4, b"parent", 1, GROUP)),
        ledger_of(7),
        Goodbye("a", b"slot", Ballot(2, "b"), entry, Ballot(1, "a")),
    )
    store = opened()
    store.write(records, slots={7: 1, 5: 0}, names={7: ("x", "y"), 5: ("z",)}, signatures=b"signed", flush=True)
    store.set_meta("key", b"value")
    for found in now_and_later(store, opened):
        assert found.durable() == Durable(*records[:4]) and found.goodbye == records[4]
        assert found.slot_table() == {7: 1, 5: 0}
        assert found.names(7) == ("x", "y") and found.names(5) == ("z",)
        assert found.signatures == b"signed" and found.meta("key") == b"value"


def test_a_record_replaces_the_last_one_of_its_kind_only(opened):
    store = opened()
    store.write([head_of(2), ledger_of(1)], slots={1: 0}, names={1: ("x",)}, flush=False)
    store.write([ledger_of(2)], flush=True)
    store.write([ledger_of(3)], slots={3: 0}, flush=False)
    for found in now_and_later(store, opened):
        assert found.durable() == Durable(head=head_of(2), ledger=ledger_of(3))
        assert found.slot_table() == {3: 0} and found.names(1) == ("x",)


def test_names_are_added_and_forgotten(opened):
    store = opened()
    store.write(names={1: ("a", "b"), 2: ("c",)}, flush=False)
    store.write(names={1: ("a", "b", "d"), 2: ("c",)}, flush=False)
    store.write(names={1: ("a", "b", "d", "e"), 3: ("f",)}, flush=False)
    for found in now_and_later(store, opened):
        assert [found.names(number) for number in (1, 2, 3)] == [("a", "b", "d", "e"), (), ("f",)]
    store = opened()
    store.write(names={1: ("e",), 3: ()}, flush=False)
    for found in now_and_later(store, opened):
        assert [found.names(number) for number in (1, 2, 3)] == [("e",), (), ()]


def test_the_log_moves_on_item_by_item(opened):
    items = log_of(12)
    store = opened()
    for end in range(1, 13):
        head = HeadRecord(snapshot_of(items[max(0, end - 4) : end]))
        store.write([head], flush=False)
        assert store.durable().head == head
        if end % 5 == 0:
            store = opened()
            assert store.durable().head == head
    assert opened().durable().head == HeadRecord(snapshot_of(items[8:]))


def test_a_new_item_costs_one_item(opened, monkeypatch):
    items, encoded = log_of(30), []
    store = opened()
    store.write([HeadRecord(snapshot_of(items[:29]))], flush=False)
    encode = module.wire.encode
    monkeypatch.setattr(module.wire, "encode", lambda value: encoded.append(value) or encode(value))
    store.write([HeadRecord(snapshot_of(items[1:]))], flush=False)
    assert [value for value in encoded if isinstance(value, LogItem)] == [items[-1]]


def test_the_log_of_another_branch_replaces_the_tail(opened):
    mine = log_of(6)
    theirs = (*mine[:3], *log_of(5, mine[2], voters="ab")[1:])
    stranger = log_of(3, LogItem.genesis(GROUP[:2]))
    other_votes = (*mine[:5], log_of(2, mine[4], voters="bc")[1])
    for items in (mine, theirs, mine[2:], other_votes, stranger, mine):
        store = opened()
        store.write([HeadRecord(snapshot_of(items))], flush=False)
        assert all(found.durable().head == HeadRecord(snapshot_of(items)) for found in now_and_later(store, opened))


def test_a_write_that_fails_changes_nothing(opened):
    store = opened()
    store.write([ledger_of(1), head_of(2)], slots={1: 0}, names={1: ("x",)}, flush=True)
    with pytest.raises(OverflowError):  # the last of the four tables takes no such number
        store.write([ledger_of(2), head_of(4)], slots={2: 0}, names={2**70: ("y",)}, flush=True)
    for found in now_and_later(store, opened):
        assert found.durable() == Durable(head=head_of(2), ledger=ledger_of(1))
        assert found.slot_table() == {1: 0} and found.names(1) == ("x",)


def test_a_full_disk_is_told_and_what_was_written_stays(tiny_disk):
    with closing(NodeStore(tiny_disk, ELEMENTS)) as store:
        store.write([ledger_of(1)], slots={1: 0}, flush=True)
        filler = tiny_disk / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        with pytest.raises(StoreError, match=r"(?s)disk refused.*1\. Make room"):
            for number in range(2, 2000):
                store.write([ledger_of(number)], slots={number: number}, signatures=bytes(10_000), flush=False)
        with pytest.raises(StoreError, match="Make room"):
            store.put_answer(hashed(bytes(10**6)), bytes(10**6))
        before, table = store.durable(), store.slot_table()
        assert list(table) == [before.ledger.next_number - 1]
        filler.unlink()
        store.write([head_of(3)], flush=True)
    with closing(NodeStore(tiny_disk, ELEMENTS)) as store:
        assert store.durable() == Durable(head=head_of(3), ledger=before.ledger)
        assert store.slot_table() == table and store.trouble is None


def test_a_start_of_the_machine_is_noticed(opened, monkeypatch):
    opened().write([ledger_of(1)], slots={1: 0}, flush=True)
    assert not opened().rebooted
    monkeypatch.setattr(module, "boot_id", lambda: b"another")
    assert opened().rebooted
    store = opened()
    assert store.rebooted  # nobody has acted on it
    store.write(slots={}, flush=True)
    assert not opened().rebooted


# --- kill -9 ---


def _write_on(folder, number: int, pipe) -> None:
    """Write one state after the other; number, slots, names and head always agree."""
    store, items = NodeStore(folder, ELEMENTS), log_of(8)
    while True:
        number += 1
        end = 1 + number % 8
        data = f"answer {number}".encode()
        store.put_answer(hashed(data), data)
        store.write(
            [ledger_of(number), HeadRecord(snapshot_of(items[max(0, end - 3) : end]))],
            slots={number: number % 5},
            names={number: tuple(f"{number}-{name}" for name in range(50))},
            flush=number % 3 == 0,
        )
        os.write(pipe, number.to_bytes(4, "big"))


def test_kill_9_leaves_one_of_the_written_states(tmp_path):
    draw, last, items = random.Random(3), 0, log_of(8)
    for _ in range(40):
        reader, writer = os.pipe()
        child = FORK.Process(target=_write_on, args=(tmp_path, last, writer), daemon=True)
        child.start()
        os.close(writer)
        told = last
        for _ in range(draw.randrange(12)):
            told = int.from_bytes(os.read(reader, 4), "big")
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        while rest := os.read(reader, 4):
            told = int.from_bytes(rest, "big")
        os.close(reader)
        with closing(NodeStore(tmp_path, ELEMENTS)) as store:
            found = store.durable()
            assert store.trouble is None
            number = found.ledger.next_number - 1 if found.ledger is not None else 0
            assert told <= number <= told + 1
            assert not [path for path in (tmp_path / "answers").iterdir() if path.name.startswith(".")]
            assert all(store.answer(digest).startswith(b"answer ") for digest in found.held)
            last = number
            if number:
                end = 1 + number % 8
                assert found.ledger == ledger_of(number)
                assert found.head == HeadRecord(snapshot_of(items[max(0, end - 3) : end]))
                assert store.slot_table() == {number: number % 5}
                assert store.names(number) == tuple(f"{number}-{name}" for name in range(50))
                assert store.names(number - 1) == ()
                assert hashed(f"answer {number}".encode()) in found.held
    assert last > 100


# --- one owner ---


def test_a_second_process_is_told_clearly(opened, tmp_path):
    store = opened()
    with pytest.raises(StoreError, match="Another process uses .*node"):
        NodeStore(tmp_path / "node", ELEMENTS)
    store.close()
    store.close()
    NodeStore(tmp_path / "node", ELEMENTS).close()
    with pytest.raises(StoreError, match="closed"):
        store.write([ledger_of(1)], flush=False)


def test_a_file_system_without_record_locks_will_do(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "knows_record_locks", lambda folder: False)
    for number in range(2):
        with closing(NodeStore(tmp_path, ELEMENTS)) as store:
            assert store.durable().ledger == (ledger_of(0) if number else None)
            store.write([ledger_of(number)], flush=True)
    assert locks.knows_record_locks(tmp_path)


# --- damage ---


def _flipped(path):
    """A bit of the promise."""
    content = bytearray(path.read_bytes())
    content[content.index(b"promised-here") + 3] ^= 1
    path.write_bytes(content)


def _another_version(path):
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")


def _of_something_else(path):
    path.unlink()
    with closing(sqlite3.connect(path)) as db:
        db.executescript("CREATE TABLE songs (name); PRAGMA user_version = 1")


def _without_an_item(path):
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM items WHERE place = 2")


def _unknown_kind(path):
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE records SET kind = 'hat' WHERE kind = 'ledger'")


def _untyped(path):
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE records SET data = 7")


def _becomes_a_folder(path):
    path.unlink()
    path.mkdir()


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(os.urandom(20_000)),
    "zeros": lambda path: path.write_bytes(bytes(20_000)),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "pages missing": lambda path: path.write_bytes(path.read_bytes()[:8192]),
    "flipped bit": _flipped,
    "another version": _another_version,
    "of something else": _of_something_else,
    "an item missing": _without_an_item,
    "unknown kind": _unknown_kind,
    "untyped": _untyped,
    "a folder": _becomes_a_folder,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_database_is_set_aside_and_told(opened, tmp_path, damage):
    store = opened()
    store.belongs_to("me")
    store.write([head_of(4), ledger_of(1), BallotRecord(b"promised-here", Ballot(1, "a"))], slots={1: 0}, flush=True)
    store.put_answer(hashed(b"answer"), b"answer")
    store.close()
    path = tmp_path / "node" / "node.sqlite"
    assert not path.with_name("node.sqlite-wal").exists()
    DAMAGES[damage](path)
    store = opened()
    assert store.durable() == Durable(held=frozenset({hashed(b"answer")})) and store.slot_table() == {}
    assert "It is kept as" in store.trouble and "new peer" in store.trouble and str(path) in store.trouble
    assert path.with_name("node.sqlite.damaged").exists()
    assert store.belongs_to("another")
    store.write([ledger_of(2)], flush=True)
    store = opened()
    assert store.trouble is None and store.durable().ledger == ledger_of(2)


def test_a_database_that_cannot_be_moved_away_is_an_error(opened, tmp_path, monkeypatch):
    opened().close()
    (tmp_path / "node" / "node.sqlite").write_bytes(b"garbage" * 1000)
    monkeypatch.setattr(module, "keep_aside", lambda *args, **more: " It cannot be moved away.")
    with pytest.raises(StoreError, match="cannot be moved away"):
        opened()


def test_another_model_has_another_store(opened):
    opened().write([ledger_of(1)], slots={1: 0}, flush=True)
    store = opened(ELEMENTS + 1)
    assert store.durable() == Durable() and "another model" in store.trouble


def test_the_log_of_a_lost_database_is_no_part_of_the_next(opened, tmp_path):
    opened().write([ledger_of(1)], flush=False)
    beside = tmp_path / "node" / "node.sqlite-wal"
    log = beside.read_bytes()
    opened().close()
    (tmp_path / "node" / "node.sqlite").unlink()
    beside.write_bytes(log)
    assert opened().durable() == Durable()


# --- whose it is ---


def test_identity_and_votes_belong_together(opened, tmp_path):
    store = opened()
    assert store.belongs_to("me")
    store.write([ledger_of(1), BallotRecord(b"slot", Ballot(1, "a"))], slots={1: 0}, flush=True)
    store.state_path(b"s").write_bytes(b"state")
    store.note_state(b"s", snapshot_of(log_of(2)), hashed(b"state"))
    store = opened()
    assert store.belongs_to("me") and store.durable().ledger == ledger_of(1) and store.trouble is None
    assert not store.belongs_to("somebody else")
    assert store.durable() == Durable() and store.slot_table() == {} and store.newest_state() is None
    assert "belongs to the peer me" in store.trouble
    assert [path.name for path in (tmp_path / "node" / "states.damaged").iterdir()] == [f"{b's'.hex()}.safetensors"]
    store.write([ledger_of(2)], flush=True)
    store = opened()
    assert store.belongs_to("somebody else") and store.durable().ledger == ledger_of(2)


# --- answers ---


def test_answers_are_kept_by_their_hash(opened):
    store, data = opened(), b"average" * 100
    digest = hashed(data)
    assert not store.has_answer(digest)
    with pytest.raises(KeyError):
        store.answer(digest)
    store.put_answer(digest, data)
    store.put_answer(digest, data)
    for found in now_and_later(store, opened):
        assert found.has_answer(digest) and found.answer(digest) == data
        assert found.answer_path(digest).read_bytes() == data
        assert found.durable().held == {digest}


def test_other_bytes_are_refused(opened):
    store = opened()
    with pytest.raises(ValueError):
        store.put_answer(hashed(b"one"), b"another")
    assert not store.has_answer(hashed(b"one"))


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"other"), lambda path: path.unlink()])
def test_a_damaged_answer_is_not_held_any_more(opened, damage):
    store, digest = opened(), hashed(b"average")
    store.put_answer(digest, b"average")
    damage(store.answer_path(digest))
    with pytest.raises(KeyError):
        store.answer(digest)
    assert not store.has_answer(digest) and not store.answer_path(digest).exists()
    assert store.durable().held == frozenset()
    store.put_answer(digest, b"average")
    assert store.answer(digest) == b"average"


def test_the_oldest_answers_go_first(opened):
    store = opened()
    answers = [bytes([number]) * 100 for number in range(6)]
    for place, data in enumerate(answers):
        store.put_answer(hashed(data), data)
        os.utime(store.answer_path(hashed(data)), ns=(place, place))
    digests = [hashed(data) for data in answers]
    store = opened()
    store.prune_answers([], 600)
    assert store.durable().held == set(digests)
    store.prune_answers([digests[0], digests[2]], 399)
    assert store.durable().held == {digests[0], digests[2], digests[5]}
    store.prune_answers(digests, 0)
    assert len(store.durable().held) == 3
    assert opened().durable().held == {digests[0], digests[2], digests[5]}
    opened().prune_answers([], 0)
    assert opened().durable().held == frozenset()


def test_what_a_killed_writer_left_goes(opened, tmp_path):
    opened()
    left = tmp_path / "node" / "answers" / f".{'ab' * 32}.0123abcd.part"
    left.write_bytes(b"half")
    assert opened().durable().held == frozenset()
    assert not left.exists()


# --- states ---


def _put_state(store: NodeStore, lineage: bytes, length: int, data: bytes) -> Snapshot:
    snapshot = snapshot_of(log_of(length))
    store.state_path(lineage).write_bytes(data)
    store.note_state(lineage, snapshot, hashed(data))
    return snapshot


def test_the_newest_state_with_its_snapshot(opened):
    store = opened()
    _put_state(store, b"a", 2, b"one")
    newest = _put_state(store, b"b", 3, b"another")
    for found in now_and_later(store, opened):
        assert found.newest_state() == found.newest_state(check=True) == (newest, found.state_path(b"b"))
        assert found.state_digest(b"b") == hashed(b"another") and found.state_digest(b"c") is None
    store = opened()
    again = _put_state(store, b"a", 4, b"one more")
    assert store.newest_state(check=True) == (again, store.state_path(b"a"))


def test_a_state_without_a_file_cannot_be_noted(opened):
    with pytest.raises(StoreError, match="not there"):
        opened().note_state(b"a", snapshot_of(log_of(2)), b"")


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"cut"), lambda path: path.unlink()])
def test_a_state_that_is_not_whole_gives_way_to_an_older_one(opened, damage):
    store = opened()
    older = _put_state(store, b"a", 2, b"one")
    _put_state(store, b"b", 3, b"another")
    damage(store.state_path(b"b"))
    for found in now_and_later(store, opened):
        assert found.newest_state() == (older, found.state_path(b"a"))


def test_other_bytes_of_the_same_size_are_found_when_asked_for(opened):
    store = opened()
    older = _put_state(store, b"a", 2, b"one")
    newer = _put_state(store, b"b", 3, b"two")
    store.state_path(b"b").write_bytes(b"six")
    assert store.newest_state() == (newer, store.state_path(b"b"))
    assert store.newest_state(check=True) == (older, store.state_path(b"a"))
    assert not store.state_path(b"b").exists()


def test_old_states_are_deleted(opened):
    store = opened()
    for number in range(5):
        _put_state(store, bytes([number]), 2, b"state")
    store.prune_states(2)
    there = [store.state_path(bytes([number])).exists() for number in range(5)]
    assert there == [False, False, False, True, True]
    store.prune_states(0)
    assert store.newest_state() is None and opened().newest_state() is None


def test_states_that_nobody_noted_are_deleted_at_the_start(opened):
    store = opened()
    _put_state(store, b"a", 2, b"one")
    store.state_path(b"b").write_bytes(b"never noted")
    store = opened()
    assert store.state_path(b"a").exists() and not store.state_path(b"b").exists()
