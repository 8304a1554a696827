"""Chunks of signed states, and testimony about live ones, between peers; in the averager's process.

Whoever has a chunk gives it: the monitor, who has downloaded it, who is downloading it, and whoever holds the same
state by its own steps. What arrives is checked against what the monitor signed, so donors need not be trusted; each
call goes through the doorkeeper, has one of few places, and is paced with all that this peer sends.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import random
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import MPFuture, ValueWithExpiration, get_dht_time
from hivemind.utils.asyncio import enter_asynchronously
from hivemind.utils.logging import get_logger

from volunteer_kit.swarm.agreement import FRESH_SIZE, LINEAGE_SIZE, PAST, SKETCH_SIZE, fresh_sketch
from volunteer_kit.swarm.averager import SwarmAverager
from volunteer_kit.swarm.chunks import ChunkStore
from volunteer_kit.swarm.fetching import HASHES, ChunkFetch, NotNow
from volunteer_kit.swarm.fork_context import FORK
from volunteer_kit.swarm.identity import is_peer_id
from volunteer_kit.swarm.manifest import MAX_CHUNKS, ROOT_SIZE
from volunteer_kit.swarm.surviving_lock import SurvivingLock

logger = get_logger(__name__)
PLACES = 16  # chunks on their way to others; 16 MB
PLACES_EACH = 6  # of one peer
DECLARED_FOR = 60.0  # s
DECLARE_EVERY = 20.0
MAX_DECLARED = 8  # states that one peer says it has
NAME_SIZE = 8  # bytes of a root in the DHT; enough to find it
MAX_DONORS = 64
TELL_PATIENCE = 5.0  # s that a witness waits for its own step to an epoch that is about to come
TELL_WITHIN = 10.0  # s for its answer
MAX_QUESTION = 64  # bytes
MAX_WORDS = 4 * FRESH_SIZE + 512  # bytes of an answer
SKETCHES_WAITING = 16
SKETCH_EVERY = 2.0  # s, for one peer
TESTIMONY_SIZE = 8 + 4 * SKETCH_SIZE + LINEAGE_SIZE + 8


class ChunkTransfer(SwarmAverager):
    """Serves and fetches chunks; says what it held at an epoch."""

    _served: Path | None = None  # folder of ChunkStores
    _serving = 0
    _declaring: asyncio.Task | None = None

    @functools.cached_property
    def _one_sketch(self) -> asyncio.Lock:
        return asyncio.Lock()  # of the averager's own loop, which is not there yet when we are built

    def __init__(self, *args, **kwargs):
        # of the parameters in shared memory, changed under their lock
        self._held_epoch = FORK.Value(ctypes.c_int64, 0, lock=False)
        # what we held after our own steps, as `state` writes it: a count, then records; for the averager's process
        self._testimony = FORK.Array("c", 4 + PAST * TESTIMONY_SIZE, lock=SurvivingLock())
        self._chunk_bytes = FORK.Value(ctypes.c_int64, 0, lock=False)  # of the fetch under way
        self._stores: dict[bytes, ChunkStore] = {}
        self._serving_to: Counter[PeerID] = Counter()
        self._in_turn: defaultdict[PeerID, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._sketching, self._sketched_for = 0, {}
        super().__init__(*args, **kwargs)

    # --- a donor ---

    async def _serve_chunks(self, folder: str) -> None:
        """From now on, all stores in this folder."""
        self._served = Path(folder)
        if self._declaring is None and not self.client_mode:
            self._declaring = asyncio.create_task(self._declare_chunks())

    async def _declare_chunks(self) -> None:
        while True:
            with suppress(Exception):
                await self._declare_once()
            await asyncio.sleep(DECLARE_EVERY)

    async def _declare_once(self) -> None:
        paths = [path for path in self._served.glob("state-*") if path.is_dir()]
        newest = sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)[:MAX_DECLARED]
        if newest:
            stored = self.dht.store(
                f"{self.prefix}.chunks",
                subkey=self.peer_id.to_bytes(),
                value=[bytes.fromhex(path.name.removeprefix("state-"))[:NAME_SIZE] for path in newest],
                expiration_time=get_dht_time() + DECLARED_FOR,
                return_future=True,
            )
            await asyncio.wait_for(stored, DECLARE_EVERY)

    async def rpc_get_chunk(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> averaging_pb2.DownloadData:
        """`metadata`: [root, index] -> `tensor_part.buffer`: the chunk, or for HASHES the list; `metadata`: why not."""
        self.doorkeeper.check(context.remote_id, "get_chunk")
        root, index = _read_request(self.serializer, request.metadata)
        if self._serving >= PLACES or self._serving_to[context.remote_id] >= PLACES_EACH:
            return averaging_pb2.DownloadData(metadata=b"busy")
        self._serving += 1
        self._serving_to[context.remote_id] += 1
        try:
            data = await asyncio.to_thread(self._look_up, root, index)
            if data is None:
                return averaging_pb2.DownloadData(metadata=b"lacks")
            async with self._in_turn[context.remote_id]:
                await self.traffic.send(len(data))
            return averaging_pb2.DownloadData(tensor_part=runtime_pb2.Tensor(buffer=data))
        finally:
            self._serving -= 1
            self._serving_to[context.remote_id] -= 1
            if not self._serving_to[context.remote_id]:
                del self._serving_to[context.remote_id]
                self._in_turn.pop(context.remote_id, None)

    def _look_up(self, root: bytes, index: int) -> bytes | None:
        if self._served is None:
            return None
        store = self._stores.get(root) or ChunkStore.find(self._served, root)
        if store is None:
            return None
        self._stores[root] = store
        try:
            return store.hashes if index == HASHES else store.get(index)
        except OSError:  # it has been deleted since
            del self._stores[root]
            return None

    async def rpc_get_told(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> averaging_pb2.DownloadData:
        """`metadata`: [epoch, seed] -> `metadata`: [what we held after our own step to it, or None; the epoch that we
        are at; the sketch of our parameters with this seed, without buffers].

        A sketch is a few sums, and whoever knows its seed can make another model with the same ones. The seed of what
        is told in rounds is the epoch. So who doubts a state draws a seed after it has come, and asks for sketches with
        that; they are of what we hold now, for what we held is gone.
        """
        self.doorkeeper.check(context.remote_id, "get_chunk")
        words = self.serializer.loads(request.metadata) if len(request.metadata) < MAX_QUESTION else None
        if not isinstance(words, (list, tuple)) or [type(word) for word in words] != [int, int]:
            return averaging_pb2.DownloadData()
        epoch, seed = words
        deadline = time.monotonic() + TELL_PATIENCE
        while True:
            told, own_epoch = self.testimony(epoch), self.told[0]
            if told is not None or epoch != own_epoch + 1 or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        if told is None and epoch == own_epoch:
            told = self.told  # taken from others, and checked as we check
        held_epoch, fresh = await self._sketch_anew(context.remote_id, seed)
        return averaging_pb2.DownloadData(metadata=self.serializer.dumps([told, held_epoch, fresh]))

    async def _sketch_anew(self, peer: PeerID, seed: int) -> tuple[int, bytes]:
        """It reads the whole model, two seconds for the original's, and steps wait for it: one at a time, and seldom
        for the same account. Empty if too many wait."""
        now, account = time.monotonic(), self.doorkeeper.account_of(peer) or peer.to_bytes()
        self._sketched_for = {other: at for other, at in self._sketched_for.items() if at > now - SKETCH_EVERY}
        due = self._sketched_for.get(account, now - SKETCH_EVERY) + SKETCH_EVERY
        if self._sketching >= SKETCHES_WAITING or due > now + SKETCH_EVERY or not 0 <= seed < 2**63:
            return self.told[0], b""
        self._sketched_for[account] = due
        self._sketching += 1
        try:
            await asyncio.sleep(max(0.0, due - now))
            async with self._one_sketch, enter_asynchronously(self.get_tensors()) as tensors:
                bounded = tensors[: len(tensors) - len(self.extra_tensors)]  # by how far steps move them
                return self._held_epoch.value, await asyncio.to_thread(fresh_sketch, bounded, seed)
        finally:
            self._sketching -= 1

    @property
    def told(self) -> list:
        """What we declare: [epoch, sketch of the parameters, lineage], and an order's sequence."""
        raise NotImplementedError

    def testimony(self, epoch: int) -> list | None:
        """What we held at `epoch` by our own steps."""
        raise NotImplementedError

    # --- a joiner ---

    async def _fetch_chunks(
        self, folder: str, root: bytes, total_bytes: int, chunk_size: int, result: MPFuture
    ) -> None:
        """Fill the store of a root. Sets `result` to the words of Fetched (None: the disk); ends if it is cancelled."""
        try:
            store = ChunkStore(ChunkStore.place(folder, root), root, total_bytes, chunk_size)
            self._chunk_bytes.value = sum(store.have()) * chunk_size

            def on_chunk() -> None:
                self._chunk_bytes.value += chunk_size

            async def ask(donor: PeerID, index: int) -> bytes:
                return await self._ask_chunk(donor, root, index)

            async def find_donors() -> list[PeerID]:
                return await self._find_chunk_donors(root)

            fetch = ChunkFetch(store, ask, self.next_chunk_timeout or 30.0, on_chunk)
            found = await fetch.run(find_donors, is_over=result.cancelled)
            if not result.cancelled():
                given = {str(donor): count for donor, count in found.given.items()}
                corrupt = [donor.to_bytes() for donor in found.corrupt]
                result.set_result([found.complete, found.chunks, found.again, corrupt, given, found.seconds])
        except Exception:
            logger.exception("A signed state could not be fetched")
            if not result.cancelled():
                result.set_result(None)

    async def _find_chunk_donors(self, root: bytes) -> list[PeerID]:
        found = await self.dht.get(f"{self.prefix}.chunks", latest=True, return_future=True)
        donors = read_chunk_donors(found.value if found else {}, root, self.peer_id)
        return random.sample(donors, min(len(donors), MAX_DONORS))

    async def _ask_chunk(self, donor: PeerID, root: bytes, index: int) -> bytes:
        stub = self.get_stub(self._p2p, donor, namespace=self.prefix)
        request = averaging_pb2.DownloadData(metadata=self.serializer.dumps([root, index]))
        answer = await stub.rpc_get_chunk(request)
        if answer.metadata in (b"busy", b"lacks"):
            raise NotNow(lacks=answer.metadata == b"lacks")
        await self.traffic.receive(len(answer.tensor_part.buffer))
        return answer.tensor_part.buffer

    async def _ask_witnesses(self, peers: list[bytes], epoch: int, seed: int, result: MPFuture) -> None:
        """What each of `peers` says to rpc_get_told. Sets [(peer, words, unread)], without those that do not answer."""

        async def ask(peer: bytes) -> tuple[bytes, Any] | None:
            with suppress(Exception):
                stub = self.get_stub(self._p2p, PeerID(peer), namespace=self.prefix)
                request = averaging_pb2.DownloadData(metadata=self.serializer.dumps([epoch, seed]))
                answer = await asyncio.wait_for(stub.rpc_get_told(request), TELL_WITHIN)
                short = len(answer.metadata) <= MAX_WORDS
                return peer, self.serializer.loads(answer.metadata) if answer.metadata and short else None
            return None

        answers = await asyncio.gather(*map(ask, peers))
        if not result.cancelled():
            result.set_result([answer for answer in answers if answer is not None])


def _read_request(serializer: Any, metadata: bytes) -> tuple[bytes, int]:
    """Raises ValueError for what is no request."""
    words = serializer.loads(metadata) if len(metadata) < 256 else None
    if not isinstance(words, (list, tuple)) or len(words) != 2:
        raise ValueError("not a request for a chunk")
    root, index = words
    if not isinstance(root, bytes) or len(root) != ROOT_SIZE or type(index) is not int or index < HASHES:
        raise ValueError("not a request for a chunk")
    if index >= MAX_CHUNKS:
        raise ValueError("not a request for a chunk")
    return root, index


def read_chunk_donors(records: Any, root: bytes, own_id: PeerID) -> list[PeerID]:
    """Who says that it has chunks of a root; ours left out."""
    found = []
    for key, info in records.items() if isinstance(records, dict) else ():
        if not is_peer_id(key) or key == own_id.to_bytes():
            continue
        names = info.value if isinstance(info, ValueWithExpiration) else None
        if isinstance(names, (list, tuple)) and root[:NAME_SIZE] in names[:MAX_DECLARED]:
            found.append(PeerID(key))
    return found
