"""Answers and states from one peer to another, over streams in memory."""

from __future__ import annotations

import asyncio
import hashlib
import random

import pytest

from tests.memory_network import Closed, Hub, Wire
from volunteer_kit.swarm.node import transfers, witnesses
from volunteer_kit.swarm.node.transfers import (
    ANSWERS,
    ANY,
    CHUNKS,
    FOLLOWERS_WAITING,
    FRESH,
    LINES_EACH,
    OFFER,
    AnswersWanted,
    ChunkedFile,
    ChunkWanted,
    Offer,
    OfferWanted,
    State,
    TransferFailed,
    Transfers,
    begun_root,
    chunked_file,
)
from volunteer_kit.swarm.node.witnesses import Question
from volunteer_kit.swarm.rounds.blobs import FRAME, receive_blob, send_blob
from volunteer_kit.swarm.state.manifest import CHUNK_SIZE
from volunteer_kit.swarm.sync.contributions import Accounts
from volunteer_kit.swarm.sync.entries import Member
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import Snapshot
from volunteer_kit.swarm.wire import encode

PATIENCE = 60.0  # s
LARGEST = 3 * 2**20
SNAP = Snapshot((LogItem.genesis([Member("a", "a", True)]),), Accounts())


def digest_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class Peer:
    """One side, with what it has."""

    def __init__(self, hub: Hub, name: str, elements: int = 10**6):
        self.name, self.answers, self.kept = name, {}, {}
        self.state: State | None = None
        self.asked = 0
        self.gives_beginning = False
        self.may_give = asyncio.Event()
        self.may_give.set()
        self.transfers = Transfers(
            Wire(hub, name), answer=self.answers.__getitem__, keep_answer=self.kept.__setitem__,
            largest_answer=LARGEST, elements=elements,
        )  # fmt: skip
        self.transfers.serve(self)

    async def offer(self, wanted: OfferWanted) -> State | None:
        self.asked += 1
        if wanted.wanted == FRESH and self.gives_beginning:
            return State(SNAP, None)
        await self.may_give.wait()
        return self.state

    def proof_of(self, snapshot: Snapshot) -> bytes:
        return b"signed"

    def chunked(self, root: bytes) -> ChunkedFile | None:
        return self.state.file if self.state is not None and self.state.file.root == root else None

    async def testify(self, question: Question) -> witnesses.Testimony:
        return witnesses.Testimony(7, True, question.lineage == SNAP.head.lineage)

    def has(self, *answers: bytes) -> list[bytes]:
        self.answers.update({digest_of(data): data for data in answers})
        return [digest_of(data) for data in answers]

    def write_state(self, folder, data: bytes) -> None:
        path = folder / f"state of {self.name}"
        path.write_bytes(data)
        self.state = State(SNAP, chunked_file(path), digest_of(data))


def play(story) -> None:
    async def whole():
        hub = Hub()
        await asyncio.wait_for(story(hub, Peer(hub, "a"), Peer(hub, "b")), PATIENCE)
        assert not hub.failures
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(whole())


def plays(hub: Hub, name: str, lies) -> None:
    """Peer "a" answers such requests with `lies(stream)`."""

    async def handler(peer, head, stream):
        await lies(stream)

    hub.handlers["a", name] = handler


# --- answers ---


def test_answers_of_all_sizes():
    async def story(hub, a, b):
        wanted = a.has(b"x", b"y" * FRAME, b"z" * (2 * FRAME + 1), b"w" * LARGEST)
        assert await b.transfers.fetch_answers(wanted, "a", 1.0) == set(wanted)
        assert b.kept == a.answers

    play(story)


def test_what_the_other_side_lacks_is_left_out():
    async def story(hub, a, b):
        here = a.has(b"one", b"two")
        assert await b.transfers.fetch_answers([here[0], bytes(32), here[1]], "a", 1.0) == set(here)

    play(story)


def test_nobody_there():
    async def story(hub, a, b):
        hub.kill("a")
        assert await b.transfers.fetch_answers([bytes(32)], "a", 1.0) == frozenset()

    play(story)


def test_what_came_before_a_stream_breaks_is_kept():
    async def story(hub, a, b):
        wanted = a.has(b"one", b"two" * FRAME)

        def tamper(stream, data):
            if stream.owner == "a" and len(data) == FRAME:
                raise Closed("broken")
            return data

        hub.tamper = tamper
        assert await b.transfers.fetch_answers(wanted, "a", 1.0) == {wanted[0]}

    play(story)


def test_other_bytes_are_not_kept():
    async def story(hub, a, b):
        good, bad = a.has(b"good", b"bad")
        a.answers[bad] = b"something else"
        assert await b.transfers.fetch_answers([bad, good], "a", 1.0) == {good}
        assert set(b.kept) == {good}

    play(story)


def size_of(size: int) -> bytes:
    return size.to_bytes(8, "little")


@pytest.mark.parametrize("frames", [[b""], [b"\xff"], [b"\xff" * 8], [size_of(LARGEST + 1)], [size_of(2**62)],
                                    [size_of(3), b"long"], [size_of(3), b""], [size_of(3)],
                                    [bytes(2**20)]])  # fmt: skip
def test_a_liar_gives_nothing(frames):
    async def story(hub, a, b):
        async def lies(stream):
            for frame in frames:
                await stream.send(frame)
            await stream.end()

        plays(hub, ANSWERS, lies)
        assert await b.transfers.fetch_answers([digest_of(b"lon")], "a", 1.0) == frozenset()

    play(story)


def test_the_same_answer_is_sent_once_for_each_request():
    """A short request must not cost its receiver any number of answers."""

    async def story(hub, a, b):
        (digest,) = a.has(b"x" * 1000)
        sent = []
        hub.tamper = lambda stream, data: sent.append(len(data)) or data
        stream = await Wire(hub, "c").ask("a", ANSWERS, encode(AnswersWanted((digest,) * 50)), 1.0)
        received = 0
        with pytest.raises(Closed):
            while True:
                received += len(await receive_blob(stream, LARGEST, PATIENCE))
        assert received == 1000

    play(story)


@pytest.mark.parametrize("head", [b"", b"\xff", size_of(3), bytes(1000)])
def test_a_request_that_makes_no_sense_ends(head):
    async def story(hub, a, b):
        stream = await Wire(hub, "c").ask("a", ANSWERS, head, 1.0)
        with pytest.raises(Closed):
            await stream.receive(PATIENCE)

    play(story)


# --- states ---


def some_bytes(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize("size", [1, FRAME, CHUNK_SIZE, 3 * CHUNK_SIZE + 7])
def test_a_state_comes_whole(tmp_path, size):
    async def story(hub, a, b):
        a.write_state(tmp_path, some_bytes(size))
        seen = []
        offer = await b.transfers.fetch_state("a", tmp_path / "here.x", 1.0, lambda *how: seen.append(how))
        assert offer == Offer(SNAP, b"signed", size, a.state.digest, a.state.file.root)
        assert (tmp_path / "here.x").read_bytes() == some_bytes(size)
        assert seen[-1] == (size, size)
        assert begun_root(tmp_path / "here.x") == b""

    play(story)


def test_zeros_do_not_travel(tmp_path):
    async def story(hub, a, b):
        data = bytes(3 * CHUNK_SIZE) + some_bytes(CHUNK_SIZE + 5) + bytes(2 * CHUNK_SIZE + 9)
        a.write_state(tmp_path, data)
        sent, seen = [], []
        hub.tamper = lambda stream, data: sent.append(len(data)) or data
        await b.transfers.fetch_state("a", tmp_path / "here.x", 1.0, lambda *how: seen.append(how))
        assert (tmp_path / "here.x").read_bytes() == data and seen[-1] == (len(data), len(data))
        assert sum(sent) < 2.5 * CHUNK_SIZE

    play(story)


def test_a_state_that_is_deleted_while_it_is_sent_still_comes(tmp_path):
    async def story(hub, a, b):
        a.write_state(tmp_path, some_bytes(5 * CHUNK_SIZE))
        seen = []

        def on_bytes(done, total):
            seen.append(done)
            a.state.file.path.unlink(missing_ok=True)

        await b.transfers.fetch_state("a", tmp_path / "here.x", 1.0, on_bytes)
        assert seen[-1] == 5 * CHUNK_SIZE

    play(story)


def test_no_state(tmp_path):
    async def story(hub, a, b):
        with pytest.raises(TransferFailed, match="no state"):
            await b.transfers.fetch_state("a", tmp_path / "here.x", 1.0)
        hub.kill("a")
        with pytest.raises(TransferFailed, match="cannot be reached"):
            await b.transfers.fetch_state("a", tmp_path / "here.x", 1.0)

    play(story)


@pytest.mark.parametrize("lie", ["garbage", "no offer", "offer", "large", "negative", "no root", "huge offer"])
def test_a_liars_offer_is_refused(tmp_path, lie, monkeypatch):
    if lie == "huge offer":
        monkeypatch.setattr(transfers, "MOST_OFFER", 100)

    async def story(hub, a, b):
        size = {"large": 2**40, "negative": -1}.get(lie, 1000)
        offer = Offer(SNAP, b"signed", size, bytes(32), b"" if lie == "no root" else bytes(32))

        async def lies(stream):
            if lie == "garbage":
                await stream.send(b"\xff")
                return
            await send_blob(stream, {"no offer": b"x", "offer": size_of(1)}.get(lie, encode(offer)))

        plays(hub, OFFER, lies)
        with pytest.raises(TransferFailed):
            await b.transfers.fetch_state("a", tmp_path / "here.x", 1.0)
        assert list(tmp_path.iterdir()) == []

    play(story)


@pytest.mark.parametrize("lie", ["other bytes", "more", "less", "no hashes", "nothing"])
def test_a_liars_chunks_are_not_taken(tmp_path, lie):
    async def story(hub, a, b):
        a.write_state(tmp_path, some_bytes(2 * CHUNK_SIZE))
        file = a.state.file

        async def lies(stream):
            await stream.receive(PATIENCE)
            await send_blob(stream, b"1" * len(file.hashes) if lie == "no hashes" else file.hashes)
            while lie != "nothing":
                await stream.receive(PATIENCE)
                chunk = {"other bytes": bytes(CHUNK_SIZE), "less": b"1"}.get(lie, some_bytes(2 * CHUNK_SIZE))
                await send_blob(stream, chunk)

        plays(hub, CHUNKS, lies)
        with pytest.raises(TransferFailed):
            await b.transfers.fetch_state("a", tmp_path / "here.x", 1.0)
        assert not (tmp_path / "here.x").exists()

    play(story)


def test_what_a_donor_gave_until_it_died_is_not_asked_for_again(tmp_path):
    async def story(hub, a, b):
        for peer in (a, b):
            peer.write_state(tmp_path, some_bytes(6 * CHUNK_SIZE))
        c = Peer(hub, "c")
        seen = []

        def on_bytes(done, total):
            seen.append(done)
            if done >= 3 * CHUNK_SIZE:
                hub.kill("a")

        with pytest.raises(TransferFailed):
            await c.transfers.fetch_state("a", tmp_path / "here.x", 1.0, on_bytes)
        assert begun_root(tmp_path / "here.x") == b.state.file.root
        before = len(seen)
        await c.transfers.fetch_state("b", tmp_path / "here.x", 1.0, on_bytes)
        assert seen[before] > 2 * CHUNK_SIZE and seen[-1] == 6 * CHUNK_SIZE
        assert (tmp_path / "here.x").read_bytes() == some_bytes(6 * CHUNK_SIZE)

    play(story)


def test_chunks_come_from_all_who_have_the_file_though_one_dies(tmp_path):
    async def story(hub, a, b):
        donors = [a, b, Peer(hub, "c")]
        for peer in donors:
            peer.write_state(tmp_path, some_bytes(12 * CHUNK_SIZE))
        joiner = Peer(hub, "joiner")
        seen = []

        def on_bytes(done, total):
            seen.append(done)
            if done >= 4 * CHUNK_SIZE:
                hub.kill("c")

        async def all_of_them():
            return [peer.name for peer in donors]

        file = a.state.file
        found = await joiner.transfers.fetch_chunks(
            file.root, file.size, tmp_path / "here.x", all_of_them, 1.0, on_bytes
        )
        assert (tmp_path / "here.x").read_bytes() == some_bytes(12 * CHUNK_SIZE)
        assert {"a", "b"} <= found.given.keys() and not found.corrupt

    play(story)


def test_a_transfer_that_is_cancelled_leaves_what_came(tmp_path):
    async def story(hub, a, b):
        a.write_state(tmp_path, some_bytes(5 * CHUNK_SIZE))
        seen = asyncio.Event()

        def on_bytes(done, total):
            if done > CHUNK_SIZE:
                seen.set()

        going = asyncio.ensure_future(b.transfers.fetch_state("a", tmp_path / "here.x", 1.0, on_bytes))
        await seen.wait()
        going.cancel()
        await asyncio.wait({going})
        assert begun_root(tmp_path / "here.x") == a.state.file.root
        assert not (tmp_path / "here.x").exists()

    play(story)


def test_one_offer_for_each_follower_and_not_too_many(tmp_path):
    async def story(hub, a, b):
        a.write_state(tmp_path, b"state")
        a.may_give.clear()
        streams, wanted = [], encode(OfferWanted())
        for number in range(FOLLOWERS_WAITING + 2):
            streams.append(await Wire(hub, f"peer {number}").ask("a", OFFER, wanted, 1.0))
        again, too_often = [await Wire(hub, "peer 0").ask("a", OFFER, wanted, 1.0) for _ in range(2)]
        for stream in (too_often, *streams[FOLLOWERS_WAITING:]):
            with pytest.raises(Closed):
                await stream.receive(PATIENCE)
        assert a.asked == transfers.SERVED_AT_ONCE
        a.may_give.set()
        for stream in (*streams[:FOLLOWERS_WAITING], again):
            assert (await receive_blob(stream, 10**6, PATIENCE)).startswith(encode(SNAP)[:1])
        for stream in (*streams, again):
            stream.close()
        assert isinstance(await b.transfers.fetch_state("a", tmp_path / "here.x", 1.0), Offer)

    play(story)


@pytest.mark.parametrize("head", [b"", bytes(31), bytes(32), bytes(1000)])
def test_chunks_of_what_is_not_here(tmp_path, head):
    async def story(hub, a, b):
        a.write_state(tmp_path, b"state")
        stream = await Wire(hub, "c").ask("a", CHUNKS, head, 1.0)
        with pytest.raises(Closed):
            await stream.receive(PATIENCE)

    play(story)


def test_one_peer_has_few_lines(tmp_path):
    async def story(hub, a, b):
        a.write_state(tmp_path, b"state")
        root, wire = a.state.file.root, Wire(hub, "c")
        lines = [await wire.ask("a", CHUNKS, root, 1.0) for _ in range(LINES_EACH)]
        for line in lines:
            await line.send(encode(ChunkWanted(0)))
            assert await receive_blob(line, 100, PATIENCE) == b"state"
            await line.send(encode(ChunkWanted(1)))
            assert await receive_blob(line, 100, PATIENCE) == b"", "there is no such chunk"
        with pytest.raises(Closed):
            await (await wire.ask("a", CHUNKS, root, 1.0)).receive(PATIENCE)
        for junk in (b"", b"\xff", size_of(5)):
            lines[0].close()
            lines[0] = await wire.ask("a", CHUNKS, root, 1.0)
            await lines[0].send(junk or b"\x00")
            with pytest.raises(Closed):
                assert await receive_blob(lines[0], 100, PATIENCE) == b""
                raise Closed("nothing came")

    play(story)


def test_a_witness_says_what_it_holds():
    async def story(hub, a, b):
        said = await b.transfers.ask_witness("a", Question(SNAP.head.lineage, 5), 1.0)
        assert said == witnesses.Testimony(7, True, True)

        async def lies(stream):
            await send_blob(stream, b"\xff")

        plays(hub, "witness", lies)
        with pytest.raises(TransferFailed, match="makes no sense"):
            await b.transfers.ask_witness("a", Question(b"x"), 1.0)

    play(story)


@pytest.mark.parametrize("is_fresh", [True, False])
def test_who_has_the_initial_parameters_is_offered_the_beginning(tmp_path, is_fresh):
    async def story(hub, a, b):
        b.write_state(tmp_path, b"a state")
        b.gives_beginning = True
        wanted = FRESH if is_fresh else ANY
        offer = await a.transfers.fetch_state("b", tmp_path / "came.x", PATIENCE, wanted=wanted)
        assert offer.snapshot == SNAP
        assert (offer.size == 0) == is_fresh
        assert (tmp_path / "came.x").exists() != is_fresh

    play(story)
