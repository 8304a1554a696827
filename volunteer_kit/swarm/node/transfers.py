"""Fetch answers and states from other peers, and give them to others.

A transfer is a channel of its own. Its head names the wanted item; everything else is blobs (`rounds/blobs.py`). Sizes
are bounded before anything is read, and hashes are checked before anything is used.

A state comes in three parts. One peer offers it: the log's tail with its proof, and the root of the hashes of its
chunks. Every member with the same bytes gives chunks of it, so a donor that dies costs only the chunks on their way;
chunks that came stay on the disk, and the next transfer goes on from there. Then the peer asks other members what they
hold at the same lineage: see `witnesses.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Protocol

from volunteer_kit.swarm.node.witnesses import Question, Testimony
from volunteer_kit.swarm.rounds.blobs import (
    FRAME,
    Channel,
    Garbled,
    Urgency,
    receive_blob,
    receive_frame,
    receive_size,
    send_blob,
    send_size,
)
from volunteer_kit.swarm.state.chunk_scheduler import HASHES, ChunkFetch, Fetched, NotNow
from volunteer_kit.swarm.state.chunk_store import ChunksError, ChunkStore, chunk_hash, root_of
from volunteer_kit.swarm.state.manifest import CHUNK_SIZE, MAX_CHUNKS, ROOT_SIZE
from volunteer_kit.swarm.sync.messages import Snapshot
from volunteer_kit.swarm.wire import WireError, decode, encode

logger = logging.getLogger(__name__)

MOST_ANSWERS: Final = 4096  # in one transfer
MOST_OFFER: Final = 64 * 2**20  # bytes: the log's tail and the accounts of a large swarm
STATE_SHARE: Final = 16  # a state has at most so many bytes for each parameter
STATE_BASE: Final = 2**20  # bytes beside
SILENCE: Final = 20.0  # s that a sender may be silent within a transfer
SERVED_AT_ONCE: Final = 4  # offers and states of orders; others wait
FOLLOWERS_WAITING: Final = 16  # more are sent away
ASKED_EACH: Final = 2  # by one follower: it has given up the first, and this side does not know it yet
LINES: Final = 64  # channels on which chunks are given
LINES_EACH: Final = 4  # of one peer
CHUNK_WITHIN: Final = 120.0  # s for one chunk
STALLED: Final = 60.0  # s without a chunk; then a transfer is given up
MOST_TESTIMONY: Final = 4096  # bytes

ANY: Final = b""  # wanted by who takes a state that is on the disk, and replays the steps since
FRESH: Final = b"fresh"  # by who has the run's initial parameters
NEWEST: Final = b"newest"  # by who only asks, and replays nothing
CHECKPOINT: Final = "checkpoint"
ANSWERS: Final = "answers"
OFFER: Final = "offer"
CHUNKS: Final = "chunks"
WITNESS: Final = "witness"


class Carrier(Protocol):
    """What opens channels: the transport."""

    def answer(self, name: str, handler: Callable[[str, bytes, Channel], Awaitable[None]]) -> None: ...

    async def ask(self, peer: str, name: str, head: bytes, timeout: float) -> Channel: ...


class TransferFailed(Exception):
    """The other side did not give what was asked for."""


class AnswersWanted(NamedTuple):
    """The head of a transfer of answers."""

    digests: tuple[bytes, ...]


class CheckpointWanted(NamedTuple):
    """The head of a transfer of the state that a rollback order names."""

    lineage: bytes
    digest: bytes  # SHA-256 of the file


class OfferWanted(NamedTuple):
    """The head of a question for a state."""

    wanted: bytes = ANY  # FRESH: the peer has the run's initial parameters; NEWEST: it replays no steps; else ANY
    root: bytes = b""  # of a state that is here in part
    fork: bytes = b""  # the state has to be behind this lineage, where the two logs part; empty: any


class ChunkWanted(NamedTuple):
    """A frame that asks for one chunk; HASHES: for the hashes of all."""

    place: int


class Offer(NamedTuple):
    """The description of a state that a peer offers."""

    snapshot: Snapshot
    signatures: bytes  # of the log's tail
    size: int  # bytes of the file; 0: the initial parameters, which the other side has
    digest: bytes  # SHA-256 of the file
    root: bytes = b""  # of the hashes of its chunks, as state/chunk_store.py has it


class ChunkedFile(NamedTuple):
    """A state's file, and the hashes of its chunks."""

    path: Path
    size: int  # bytes
    root: bytes
    hashes: bytes


class State(NamedTuple):
    """A state to give away: a file with what belongs to it."""

    snapshot: Snapshot
    file: ChunkedFile | None  # None: the initial parameters, for one that has them
    digest: bytes = b""


class StateGiver(Protocol):
    """The source of the states that a node gives: states.States."""

    async def offer(self, wanted: OfferWanted) -> State | None: ...

    def proof_of(self, snapshot: Snapshot) -> bytes: ...

    def chunked(self, root: bytes) -> ChunkedFile | None: ...

    async def testify(self, question: Question) -> Testimony: ...


def chunked_file(path: Path) -> ChunkedFile:
    """Read a file, and hash its chunks: about a second for each GB. Raises OSError."""
    hashes, size = bytearray(), 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_SIZE):
            hashes += chunk_hash(chunk)
            size += len(chunk)
    return ChunkedFile(path, size, root_of(bytes(hashes)), bytes(hashes))


async def _receive_blob(channel: Channel, most: int, on_part: Callable[[int], None] = lambda size: None) -> bytes:
    with _may_fail():
        return await receive_blob(channel, most, SILENCE, on_part)


@contextmanager
def _may_fail() -> Iterator[None]:
    """Receive over a channel inside: any failure there raises TransferFailed."""
    try:
        yield
    except Garbled as error:
        raise TransferFailed(str(error)) from None
    except Exception as error:  # the stream's end, silence, or p2pd's words
        raise TransferFailed(f"the stream ended: {error!r}"[:200]) from None


async def _send_file(channel: Channel, file: BinaryIO) -> None:
    await send_size(channel, os.fstat(file.fileno()).st_size)
    while part := file.read(FRAME):
        await channel.send(part)


class Transfers:
    """Both sides of a node's transfers.

    :param answer: the bytes of an answer, in a thread; raises KeyError if it is not here
    :param keep_answer: store an answer whose hash was checked, in a thread; raises OSError
    :param largest_answer: bytes
    :param checkpoint: the file of the state that a rollback order names, by lineage and SHA-256; None: it is not here
    :param elements: of the parameter vector
    """

    def __init__(
        self,
        carrier: Carrier,
        *,
        answer: Callable[[bytes], bytes],
        keep_answer: Callable[[bytes, bytes], None],
        largest_answer: int,
        elements: int,
        checkpoint: Callable[[bytes, bytes], Path | None] = lambda lineage, digest: None,
    ):
        self._carrier = carrier
        self._answer, self._keep_answer, self._largest_answer = answer, keep_answer, largest_answer
        self._checkpoint = checkpoint
        self._most_state = STATE_BASE + STATE_SHARE * elements
        self._serving = asyncio.Semaphore(SERVED_AT_ONCE)
        self._followers: dict[tuple[str, str], deque[asyncio.Event]] = {}  # (what it waits for, peer) -> its turns
        self._lines: Counter[str] = Counter()  # peer -> channels on which it is given chunks
        carrier.answer(ANSWERS, self._give_answers)
        carrier.answer(CHECKPOINT, self._give_checkpoint)

    def serve(self, giver: StateGiver) -> None:
        """Give others what this node has of states, from here on."""
        self._giver = giver
        self._carrier.answer(OFFER, self._give_offer)
        self._carrier.answer(CHUNKS, self._give_chunks)
        self._carrier.answer(WITNESS, self._give_testimony)

    # --- giving ---

    async def _give_answers(self, peer: str, head: bytes, channel: Channel) -> None:
        try:
            wanted: AnswersWanted = decode(AnswersWanted, head)
        except WireError:
            return
        channel.urgency = Urgency.PARTS  # the next round waits for the peer that lacks them
        loop = asyncio.get_running_loop()
        for digest in dict.fromkeys(wanted.digests[:MOST_ANSWERS]):
            try:
                data = await loop.run_in_executor(None, self._answer, digest)
            except KeyError:
                data = b""
            await send_blob(channel, data, more=True)
        await channel.end()

    async def _give_offer(self, peer: str, head: bytes, channel: Channel) -> None:
        try:
            wanted: OfferWanted = decode(OfferWanted, head)
        except WireError:
            return
        async with self._follower(OFFER, peer) as is_served:
            if not is_served:
                return
            state = await self._giver.offer(wanted)
            if state is None:
                await send_size(channel, 0)
            else:
                size, root = (state.file.size, state.file.root) if state.file is not None else (0, b"")
                proof = self._giver.proof_of(state.snapshot)
                await send_blob(channel, encode(Offer(state.snapshot, proof, size, state.digest, root)), more=True)
            await channel.end()

    async def _give_chunks(self, peer: str, head: bytes, channel: Channel) -> None:
        """The head is the root; then one chunk for each frame that asks for one."""
        file = self._giver.chunked(head) if len(head) == ROOT_SIZE else None
        if file is None or self._lines[peer] >= LINES_EACH or self._lines.total() >= LINES:
            channel.close()
            return
        self._lines[peer] += 1
        try:
            with open(file.path, "rb", buffering=0) as opened:  # it stays readable if it is deleted meanwhile
                while True:
                    with _may_fail():
                        wanted: ChunkWanted = decode(ChunkWanted, await channel.receive(SILENCE))
                    await send_blob(channel, await asyncio.to_thread(_chunk_of, opened, file, wanted.place))
        except (TransferFailed, OSError):
            channel.close()  # it has all that it wanted, or is gone
        finally:
            self._lines[peer] -= 1
            self._lines += Counter()  # without those that have none

    async def _give_testimony(self, peer: str, head: bytes, channel: Channel) -> None:
        try:
            question: Question = decode(Question, head)
        except WireError:
            return
        async with self._follower(WITNESS, peer) as is_served:
            if is_served:
                await send_blob(channel, encode(await self._giver.testify(question)), more=True)
                await channel.end()

    @asynccontextmanager
    async def _follower(self, what: str, peer: str) -> AsyncIterator[bool]:
        """One transfer of a kind at a time for each follower: whether this one is served. A second one waits until the
        first has ended."""
        key = (what, peer)
        turns = self._followers.get(key, deque())
        is_one_too_many = not turns and sum(kind == what for kind, _ in self._followers) >= FOLLOWERS_WAITING
        if is_one_too_many or len(turns) >= ASKED_EACH:
            yield False
            return
        self._followers[key] = turns
        turn = asyncio.Event()
        turns.append(turn)
        try:
            if turns[0] is not turn:
                await turn.wait()
            async with self._serving:
                yield True
        finally:
            turns.remove(turn)
            if turns:
                turns[0].set()
            else:
                del self._followers[key]

    async def _give_checkpoint(self, peer: str, head: bytes, channel: Channel) -> None:
        try:
            wanted = decode(CheckpointWanted, head)
        except WireError:
            return
        path = self._checkpoint(wanted.lineage, wanted.digest)
        if path is None:
            await send_size(channel, 0)
            await channel.end()
            return
        async with self._follower(CHECKPOINT, peer) as is_served:
            if is_served:
                with open(path, "rb") as file:
                    await _send_file(channel, file)
                await channel.end()

    # --- getting ---

    async def fetch_answers(
        self,
        digests: Sequence[bytes],
        source: str,
        timeout: float,
        is_usable: Callable[[bytes, bytes], bool] = lambda digest, data: True,
    ) -> frozenset[bytes]:
        """Get answers from one peer; those that came whole, and are of use.

        :param timeout: s, until the channel is open
        :param is_usable: hash and bytes -> whether to keep them, in a thread
        """
        got: set[bytes] = set()
        wanted = list(dict.fromkeys(digests))[:MOST_ANSWERS]
        try:
            channel = await self._carrier.ask(source, ANSWERS, encode(AnswersWanted(tuple(wanted))), timeout)
        except Exception:  # it cannot be reached
            return frozenset()
        try:
            for digest in wanted:
                data = await _receive_blob(channel, self._largest_answer)
                if data and hashlib.sha256(data).digest() == digest:
                    if await asyncio.get_running_loop().run_in_executor(None, self._keep, digest, data, is_usable):
                        got.add(digest)
        except TransferFailed:
            pass
        except OSError as error:
            logger.warning("An answer could not be kept: %s", error)
        finally:
            channel.close()
        return frozenset(got)

    def _keep(self, digest: bytes, data: bytes, is_usable: Callable[[bytes, bytes], bool]) -> bool:
        """Raises OSError."""
        if not is_usable(digest, data):
            return False
        self._keep_answer(digest, data)
        return True

    async def fetch_offer(self, source: str, timeout: float, wanted: OfferWanted) -> Offer:
        """Ask one peer for a state; its size is 0 where it offers the run's beginning.

        :param timeout: s, until the channel is open
        :raises TransferFailed: with the reason
        """
        data = await self._ask_blob(source, OFFER, encode(wanted), timeout, MOST_OFFER)
        if not data:
            raise TransferFailed("it has no state")
        try:
            offer: Offer = decode(Offer, data, MOST_OFFER)
        except WireError as error:
            raise TransferFailed(f"its offer makes no sense: {error}") from None
        if wanted.wanted == FRESH and offer.size == 0:
            return offer
        if not 0 < offer.size <= min(self._most_state, MAX_CHUNKS * CHUNK_SIZE):
            raise TransferFailed(f"{offer.size} bytes were announced, {self._most_state} are the most")
        if len(offer.root) != ROOT_SIZE:
            raise TransferFailed("its offer makes no sense: no root")
        return offer

    async def ask_witness(self, peer: str, question: Question, timeout: float) -> Testimony:
        """Ask a peer what it holds at a lineage.

        :param timeout: s, until the channel is open
        :raises TransferFailed: with the reason
        """
        data = await self._ask_blob(peer, WITNESS, encode(question), timeout, MOST_TESTIMONY)
        try:
            said: Testimony = decode(Testimony, data)
        except WireError as error:
            raise TransferFailed(f"its testimony makes no sense: {error}") from None
        return said

    async def fetch_chunks(
        self,
        root: bytes,
        size: int,
        path: Path,
        donors: Callable[[], Awaitable[Iterable[str]]],
        timeout: float,
        on_bytes: Callable[[int, int], None] = lambda done, total: None,
    ) -> Fetched:
        """Get the file with this root into `path`, from several peers at once. The chunks that came stay beside `path`
        where this fails, and the next call goes on from there.

        :param size: bytes of the file
        :param donors: those that have it; asked again while it comes
        :param timeout: s, until a channel is open
        :param on_bytes: told how much of it is here
        :raises TransferFailed: with the reason
        """
        here, came = 0, time.monotonic()

        def on_part(part: int) -> None:
            nonlocal here, came
            here, came = min(here + part, size), time.monotonic()
            on_bytes(here, size)

        lines = _Lines(self._carrier, root, timeout, max(CHUNK_SIZE, ROOT_SIZE * -(-size // CHUNK_SIZE)), on_part)
        try:
            store = _begun(parts_folder(path), root, size)
            here = min(sum(store.have()) * CHUNK_SIZE, size)
            fetch = ChunkFetch(store, lines.ask, CHUNK_WITHIN)
            found = await fetch.run(
                donors, is_over=lambda: fetch.has_lost_all or time.monotonic() - came > STALLED
            )
            if not found.complete:
                raise TransferFailed("nobody gave the rest of it")
            if not await asyncio.to_thread(store.verify):
                raise TransferFailed("the disk has lost a part of it")
            os.replace(store.path / "state", path)
            if here < size:  # chunks of zeros did not travel
                on_bytes(size, size)
            shutil.rmtree(store.path, ignore_errors=True)
            return found
        except (OSError, ChunksError) as error:
            raise TransferFailed(f"{path} cannot be written: {error}") from error
        finally:
            lines.close()

    async def fetch_state(
        self,
        source: str,
        path: Path,
        timeout: float,
        on_bytes: Callable[[int, int], None] = lambda done, total: None,
        wanted: bytes = ANY,
    ) -> Offer:
        """Get a state from one peer into `path`; nothing comes if its size is 0. Nobody else is asked about it.

        :param timeout: s, until a channel is open
        :param on_bytes: told how much of it is here
        :param wanted: ANY, FRESH or NEWEST
        :raises TransferFailed: with the reason
        """
        offer = await self.fetch_offer(source, timeout, OfferWanted(wanted, begun_root(path)))
        if offer.size:

            async def donors() -> Iterable[str]:
                return (source,)

            await self.fetch_chunks(offer.root, offer.size, path, donors, timeout, on_bytes)
            if await asyncio.to_thread(sha256_of, path) != offer.digest:
                path.unlink()
                raise TransferFailed("the bytes are not those that were announced")
        return offer

    async def _ask_blob(self, peer: str, name: str, head: bytes, timeout: float, most: int) -> bytes:
        """Raises TransferFailed."""
        try:
            channel = await self._carrier.ask(peer, name, head, timeout)
        except Exception as error:
            raise TransferFailed(f"it cannot be reached: {error!r}"[:200]) from None
        try:
            return await _receive_blob(channel, most)
        finally:
            channel.close()

    async def fetch_checkpoint(
        self,
        wanted: CheckpointWanted,
        source: str,
        path: Path,
        timeout: float,
        on_bytes: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Get the state that a rollback order names from one peer into `path`. Parameters as of fetch_state.

        :raises TransferFailed: with the reason
        """
        try:
            channel = await self._carrier.ask(source, CHECKPOINT, encode(wanted), timeout)
        except Exception as error:
            raise TransferFailed(f"it cannot be reached: {error!r}"[:200]) from None
        try:
            with _may_fail():
                size = await receive_size(channel, self._most_state, SILENCE)
            if not size:
                raise TransferFailed("it has no such state")
            await self._receive_file(channel, size, wanted.digest, path, on_bytes)
        finally:
            channel.close()

    async def _receive_file(
        self, channel: Channel, size: int, digest: bytes, path: Path, on_bytes: Callable[[int, int], None]
    ) -> None:
        found, done = hashlib.sha256(), 0
        part_path = path.with_suffix(".part")
        try:
            with open(part_path, "wb") as file:
                while done < size:
                    with _may_fail():
                        part = await receive_frame(channel, size - done, SILENCE)
                    done += len(part)
                    found.update(part)
                    file.write(part)
                    on_bytes(done, size)
            if found.digest() != digest:
                raise TransferFailed("the bytes are not those that were announced")
            part_path.replace(path)
        finally:
            part_path.unlink(missing_ok=True)


class _Lines:
    """Channels on which chunks of one state come, one at a time on each.

    :param timeout: s, until a channel is open
    :param most: bytes of an answer
    :param on_part: told how many bytes of chunks came, with each frame
    """

    def __init__(self, carrier: Carrier, root: bytes, timeout: float, most: int, on_part: Callable[[int], None]):
        self._carrier, self._root, self._timeout, self._most = carrier, root, timeout, most
        self._on_part = on_part
        self._idle: dict[str, list[Channel]] = {}

    async def ask(self, donor: Any, index: int) -> bytes:
        """As chunk_scheduler.Ask."""
        idle = self._idle.setdefault(donor, [])
        channel = idle.pop() if idle else await self._carrier.ask(donor, CHUNKS, self._root, self._timeout)
        try:
            await channel.send(encode(ChunkWanted(index)))
            data = await _receive_blob(channel, self._most, self._on_part if index != HASHES else lambda size: None)
        except BaseException:
            channel.close()
            raise
        idle.append(channel)
        if not data:
            raise NotNow(lacks=True)
        return data

    def close(self) -> None:
        """Those that no answer is awaited on; the others close with their question."""
        for idle in self._idle.values():
            for channel in idle:
                channel.close()


def parts_folder(path: Path) -> Path:
    """Return the folder of the chunks that have come of the file to be at `path`."""
    return path.with_suffix(".parts")


def begun_root(path: Path) -> bytes:
    """The root of the state that has come in part, to be at `path`; empty: none."""
    try:
        names = [each.name.removeprefix("state-") for each in parts_folder(path).iterdir()]
        roots = [bytes.fromhex(name) for name in names]
    except (OSError, ValueError):
        return b""
    return next((root for root in roots if ChunkStore.find(parts_folder(path), root) is not None), b"")


def sha256_of(path: Path) -> bytes:
    """Return the SHA-256 of a file's bytes. Raises OSError."""
    found = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(2**20):
            found.update(block)
    return found.digest()


def _begun(folder: Path, root: bytes, size: int) -> ChunkStore:
    """The chunks of this root that are here; those of others are deleted. Raises OSError, ChunksError."""
    folder.mkdir(parents=True, exist_ok=True)
    ChunkStore.keep(folder, [root])
    return ChunkStore.begun(folder, root, size)


def _chunk_of(opened: BinaryIO, file: ChunkedFile, index: int) -> bytes:
    """Empty: there is no such chunk. Raises OSError."""
    if index == HASHES:
        return file.hashes
    if not 0 <= index * CHUNK_SIZE < file.size:
        return b""
    return os.pread(opened.fileno(), CHUNK_SIZE, index * CHUNK_SIZE)
