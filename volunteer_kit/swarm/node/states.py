"""Manage the states of a node: have its own written, give them to others, and take one of another member.

Members write their states at the same epochs, so that a newcomer finds equal files at several of them: it takes chunks
from all, and they can attest to the state (`witnesses.py`). If epochs are long, the grid of these epochs is finer, in
powers of two, so that each epoch of a coarse grid is one of a finer grid too.

An observer (`observer.py`) takes no steps behind a state, so the node writes one for it at the training process's
epoch, keeps it apart and lists it nowhere. A member of another branch asks for one as well if the branches parted
behind the last state on the grid. Others write theirs when they are asked to attest to it, if they are at that epoch.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from volunteer_kit.swarm.node.access import Access, Proof
from volunteer_kit.swarm.node.proofs import read_proof, why_not_proven
from volunteer_kit.swarm.node.signatures import Signatures
from volunteer_kit.swarm.node.store import NodeStore
from volunteer_kit.swarm.node.talk import Check, Checked, Downloading, Load, StateWritten, Told, WriteState
from volunteer_kit.swarm.node.transfers import (
    ANY,
    FRESH,
    NEWEST,
    ChunkedFile,
    Offer,
    OfferWanted,
    State,
    TransferFailed,
    Transfers,
    begun_root,
    chunked_file,
    sha256_of,
)
from volunteer_kit.swarm.node.witnesses import (
    MOST_SEED,
    WITNESSES,
    Held,
    Question,
    Testimony,
    attest,
    most_held,
    one_for_each,
    sketch_of,
)
from volunteer_kit.swarm.sync.contributions import Accounts
from volunteer_kit.swarm.sync.core import SyncCore
from volunteer_kit.swarm.sync.log import LogItem, items_behind
from volunteer_kit.swarm.sync.messages import Event, Snapshot, SnapshotFailed, SnapshotTaken
from volunteer_kit.swarm.sync.phases import Phase
from volunteer_kit.swarm.wire import WireError, encode

logger = logging.getLogger(__name__)

OPENS_WITHIN: Final = 8.0  # s for a channel to another peer
WRITTEN_WITHIN: Final = 120.0  # s for the training process to write its state, or to look at one
STATE_EVERY: Final = 600.0  # s between two states on the disk, about; epochs on the grid are nearer where they are long
NEWEST_EVERY: Final = 10.0  # s between two states that are written for those who only ask
STATES_KEPT: Final = 2
FEW_STEPS: Final = 4  # whose answers are fewer bytes than a state with its statistics
PROGRESS_OF_ARRIVAL: Final = 64  # a state that arrives has to come on by this part of it, until another is asked for
HEARD_WITHIN: Final = 15.0  # s for what witnesses say
SKETCHED_WITHIN: Final = 60.0  # s for their sketches; one takes some seconds a GB
MOST_SAID: Final = 4 * WITNESSES  # peers that are asked about one state
WAITS_TO_TESTIFY: Final = 10.0  # s that a witness waits for its own state of that epoch
ON_GRID: Final = b""  # what a state's file is called while it is written
FOR_OBSERVERS: Final = b"newest"
FOUNDER: Final = "founder"  # the store's key of the token with which the run was begun
SETTLED: Final = frozenset({Phase.COLLECTING, Phase.EXCHANGING, Phase.VOTING})


class States:
    """See above. The engine builds it and calls it; all of it runs on the engine's loop.

    :param core: the core, once there is one
    :param tell: hands a message to the training process
    :param handle: hands the core an event
    :param spawn: runs a coroutine in a task that is held
    :param begin: stands at the run's beginning, with the parameters that the training process has
    :param load_message: what tells the training process to take the state of this snapshot from this file, and the
        steps of these items behind it; with the reason
    :param is_fresh: whether the training process has the run's initial parameters
    :ivar heads: snapshots of the log's lineages: a state of any of them can be served
    """

    def __init__(
        self,
        store: NodeStore,
        transfers: Transfers,
        signatures: Signatures,
        access: Access,
        kept_entries: int,
        tolerance: float,
        core: Callable[[], SyncCore],
        tell: Callable[[Any], None],
        handle: Callable[[Event], None],
        spawn: Callable[[Any], asyncio.Task[None]],
        begin: Callable[[Snapshot], None],
        load_message: Callable[[Snapshot, Path, Iterable[LogItem], str], Load],
        is_fresh: Callable[[], bool],
    ):
        self._store, self._transfers, self._signatures, self._access = store, transfers, signatures, access
        self._kept_entries, self._tolerance = kept_entries, tolerance
        self._core, self._tell, self._handle, self._spawn = core, tell, handle, spawn
        self._begin, self._load_message, self._is_fresh = begin, load_message, is_fresh
        self.heads: dict[bytes, Snapshot] = {}
        self._files: dict[bytes, ChunkedFile] = {}  # by lineage
        self._hashing = asyncio.Lock()
        self._sketching = asyncio.Lock()
        self._arriving: asyncio.Task[None] | None = None  # the transfer of a state
        self._arrived_bytes = (0, 0, 0)  # of it: here now, here when another one was asked for last, all
        self._is_judging = False  # its witnesses are heard, or it is here and looked at: that ends by itself
        self._taken: tuple[Snapshot, bytes] | None = None  # a state that came, until the core has judged it
        self._asked: dict[Path, asyncio.Future[StateWritten]] = {}
        self._latest: State | None = None  # for those who only ask
        self._latest_at = float("-inf")  # s, when it was asked for
        self._asking = asyncio.Lock()
        self._checks: dict[Path, asyncio.Future[Checked]] = {}
        self._founder = b""  # the founder's token, of the snapshot that came last
        transfers.serve(self)

    # --- written by the training process ---

    def note_heads(self, heads: Iterable[Snapshot]) -> None:
        """The log has come to these heads; those that it has forgotten are forgotten here, too."""
        for snapshot in heads:
            self.heads[snapshot.head.lineage] = snapshot
        log = self._core().log
        if log is not None:
            self.heads = {lineage: head for lineage, head in self.heads.items() if lineage in log}

    @property
    def _grid(self) -> int:
        """Every so many epochs members write their states: a power of two."""
        step = 1
        while 8 * step <= self._kept_entries:
            step *= 2
        while step > 1 and step * self._core().epoch_seconds > STATE_EVERY:
            step //= 2
        return step

    def write_if_on_grid(self, epoch: int) -> None:
        """The training process was just told to come to this epoch: it writes the state behind it."""
        if epoch % self._grid == 0:
            self._ask(ON_GRID)

    def write_if_due(self, lineage: bytes) -> None:
        """The training process is at this lineage. A restart begins with a state on the disk, and takes the steps
        behind it that the log still has."""
        log = self._core().log
        if log is None or lineage not in log or self._asked:
            return
        state = self._store.newest_state()
        behind = items_behind(log.items, state[0].head.lineage) if state is not None else None
        if behind is None or len(behind) >= self._kept_entries // 3:
            self._ask(ON_GRID)

    def _ask(self, name: bytes) -> asyncio.Future[StateWritten]:
        path = self._store.state_path(name)
        if path not in self._asked:
            self._asked[path] = asyncio.get_running_loop().create_future()
            self._tell(WriteState(path))
        return self._asked[path]

    def on_written(self, message: StateWritten) -> None:
        """The training process has written its state, or could not."""
        asked = self._asked.pop(message.path, None)
        snapshot = self.heads.get(message.lineage)
        if not message.error and snapshot is not None and message.path == self._store.state_path(ON_GRID):
            message.path.replace(self._store.state_path(message.lineage))
            self._note(snapshot, message.digest)
        elif message.error:
            self._tell(Told("warning", message.error))
        if asked is not None and not asked.done():
            asked.set_result(message)

    def _note(self, snapshot: Snapshot, digest: bytes) -> None:
        self._files.pop(snapshot.head.lineage, None)
        self._store.note_state(snapshot.head.lineage, snapshot, digest)
        self._store.prune_states(STATES_KEPT)

    # --- taken from others ---

    def fetch(self, source: str, fork: bytes = b"") -> None:
        """Get a state that this peer offers, behind the lineage `fork` if that is given; `SnapshotTaken` or
        `SnapshotFailed` tells what came of it. One that is on its way, and comes on, is waited for: a large one takes
        longer than the core's patience."""
        done, before, total = self._arrived_bytes
        if self._arriving is not None:
            if self._is_judging or (done - before) * PROGRESS_OF_ARRIVAL > total:
                self._arrived_bytes = (done, done, total)
                return
            self._arriving.cancel()
        self._arrived_bytes, self._is_judging = (0, 0, 0), False
        self._arriving = self._spawn(self._get(source, fork))

    def _on_bytes(self, done: int, total: int) -> None:
        self._arrived_bytes = (done, self._arrived_bytes[1], total)
        self._tell(Downloading(done, total))

    async def _get(self, source: str, fork: bytes) -> None:
        path = self._store.state_path(b"arriving")
        self._drop_taken()
        try:
            wanted = OfferWanted(FRESH if self._is_fresh() else ANY, begun_root(path), fork)
            offer = await self._transfers.fetch_offer(source, OPENS_WITHIN, wanted)
            proof = read_proof(offer.signatures)
            why = why_not_proven(offer.snapshot, proof, self._access, self._signatures)
            if not why and not offer.size and not is_beginning(offer.snapshot):
                why = "it has no bytes, and is not the run's beginning"
            if why:
                raise TransferFailed(why)
            digest = await self._get_file(source, offer, path, bool(fork))
        except (TransferFailed, WireError) as error:
            self._arriving = None
            self._tell(Told("warning", f"No model came from {source}: {error}"))
            self._handle(SnapshotFailed(source))
            return
        self._arriving, self._founder = None, proof.founder
        if not offer.size:
            self._begin(offer.snapshot)
            return
        taken = self._store.state_path(offer.snapshot.head.lineage)
        path.replace(taken)
        self._taken = (offer.snapshot, digest)
        self._handle(SnapshotTaken(offer.snapshot))
        if self._core().weighed != offer.snapshot.head.lineage:
            self._drop_taken()

    def _drop_taken(self) -> None:
        """The core has no use for the state that came; the file may be one that was noted before."""
        taken, self._taken = self._taken, None
        if taken is not None and self._store.state_digest(taken[0].head.lineage) is None:
            self._store.state_path(taken[0].head.lineage).unlink(missing_ok=True)

    async def _get_file(self, source: str, offer: Offer, path: Path, is_fork: bool) -> bytes:
        """Bring the state of an offer into `path`, and hear its witnesses. :returns: its SHA-256. Raises
        TransferFailed.

        :param is_fork: whether its branch wins against ours: then those that stand on ours say nothing about it
        """
        head = offer.snapshot.head
        said: dict[str, Testimony] = {}  # by peer

        async def hear_all(seed: int, peers: Iterable[str]) -> None:
            heard = await self._hear(Question(head.lineage, seed), peers)
            ours = self._core().on_our_branch(heard) if is_fork else ()
            said.update((peer, each) for peer, each in heard.items() if each.knows or peer not in ours)

        self._is_judging = True
        others = self._others(source, offer.snapshot)
        await hear_all(0, others)
        if not offer.size:
            self._require_attested(source, Held(head.epoch, b""), said)
            return b""
        root, _ = most_held(source, {source: offer.root} | _roots(said, offer.size))

        has_looked = False

        async def donors() -> Iterable[str]:
            nonlocal has_looked
            if has_looked and len(said) < MOST_SAID:  # some may have gone, and others come
                await hear_all(0, [peer for peer in self._others(source, offer.snapshot) if peer not in said])
            has_looked = True
            having = [peer for peer, each in said.items() if each.root == root]
            return [source, *having] if offer.root == root else having

        self._is_judging = False
        await self._transfers.fetch_chunks(root, offer.size, path, donors, OPENS_WITHIN, self._on_bytes)
        self._is_judging = True
        try:
            found = await self.look_at(path)
            if isinstance(found, str):
                raise TransferFailed(found)
            if (found.lineage, found.epoch) != (head.lineage, head.epoch):
                raise TransferFailed("it is not the state of its log")
            seed = 1 + secrets.randbelow(MOST_SEED - 1)
            unsure = [peer for peer in others if peer in said and said[peer].knows and said[peer].root != root]
            sketch = b""
            if unsure:
                sketch = await asyncio.to_thread(sketch_of, path, seed)
                await hear_all(seed, unsure)
            self._require_attested(source, Held(head.epoch, root, sketch), said)
            return await asyncio.to_thread(sha256_of, path)
        except TransferFailed:
            path.unlink(missing_ok=True)
            raise

    # --- witnesses ---

    def _others(self, source: str, snapshot: Snapshot) -> list[str]:
        """Peers to be asked, one of each account: those that discovery knows, and those of the state's own log."""
        known = {member.peer: member.account for member in self._core().known}
        known |= {peer: member.account for peer, member in snapshot.items[-1].membership.view.items() if member.public}
        shuffled = {peer: known[peer] for peer in random.sample(sorted(known), len(known))}
        mine = self._core().me
        but = {mine.account, known.get(source, source)}
        chosen = one_for_each({peer: each for peer, each in shuffled.items() if peer not in (mine.peer, source)}, but)
        return list(chosen.values())[:WITNESSES]

    async def _hear(self, question: Question, peers: Iterable[str]) -> dict[str, Testimony]:
        """Ask these peers, and return the testimonies of those that answer in time."""

        async def ask(peer: str) -> tuple[str, Testimony] | None:
            try:
                testimony = self._transfers.ask_witness(peer, question, OPENS_WITHIN)
                return peer, await asyncio.wait_for(testimony, SKETCHED_WITHIN if question.seed else HEARD_WITHIN)
            except (TransferFailed, asyncio.TimeoutError):
                return None

        return dict(filter(None, await asyncio.gather(*map(ask, peers))))

    def _require_attested(self, source: str, held: Held, said: dict[str, Testimony]) -> None:
        """Raises TransferFailed."""
        account_of = self._access.account_of
        accounts = {peer: account for peer in said if (account := account_of(peer)) is not None}
        but = {self._core().me.account, account_of(source) or source}
        heard = {account: said[peer] for account, peer in one_for_each(accounts, but).items()}
        why = attest(held, heard, self._tolerance).why_refused
        if why is not None:
            raise TransferFailed(why)

    async def testify(self, question: Question) -> Testimony:
        """Tell what this peer holds at a lineage. Wait a little for a state that is being written."""
        lineage = question.lineage
        asked = self._asked.get(self._store.state_path(ON_GRID))
        if asked is not None and self._knows(lineage) and self._store.state_digest(lineage) is None:
            await asyncio.wait([asked], timeout=WAITS_TO_TESTIFY)
        core = self._core()
        epoch = core.head.epoch if core.head is not None else -1
        said = Testimony(epoch, core.phase in SETTLED, self._knows(lineage))
        file = await self._file_of(lineage) if said.knows else None
        if file is None and said.knows:
            file = await self._latest_file(lineage)
        if file is None:
            return said
        said = said._replace(root=file.root, size=file.size)
        if not 0 < question.seed < MOST_SEED:
            return said
        async with self._sketching:
            return said._replace(sketch=await asyncio.to_thread(sketch_of, file.path, question.seed))

    async def _latest_file(self, lineage: bytes) -> ChunkedFile | None:
        """The state that is written for those who only ask, if it is at this lineage; else one is written now."""
        latest, core = self._latest, self._core()
        if (latest is None or latest.snapshot.head.lineage != lineage) and core.head is not None:
            is_soon = time.monotonic() - self._latest_at <= NEWEST_EVERY
            latest = None if is_soon or core.head.lineage != lineage else await self._offer_latest(b"")
        return latest.file if latest is not None and latest.snapshot.head.lineage == lineage else None

    def _knows(self, lineage: bytes) -> bool:
        log = self._core().log
        return log is not None and lineage in log

    # --- judged by the training process and the core ---

    async def look_at(self, path: Path) -> Checked | str:
        """Return the training process's findings in this file, or why it cannot use the file."""
        checked = self._checks[path] = asyncio.get_running_loop().create_future()
        self._tell(Check(path))
        try:
            found: Checked = await asyncio.wait_for(checked, WRITTEN_WITHIN)
            return found.error or found
        except asyncio.TimeoutError:
            return "the training process did not look at it in time"
        finally:
            self._checks.pop(path, None)

    def on_checked(self, message: Checked) -> None:
        """The training process has looked at a file."""
        checked = self._checks.get(message.path)
        if checked is not None and not checked.done():
            checked.set_result(message)

    def founds_with(self, token: bytes) -> None:
        """This peer begins the run."""
        self._founder = token

    def adopt(self, snapshot: Snapshot, reason: str) -> None:
        """The core stands where this snapshot stands: the training process takes the state that came with it."""
        self.keep_founder(snapshot)
        self._note_taken()
        self._tell(self._load_message(snapshot, self._store.state_path(snapshot.head.lineage), (), reason))

    def keep_founder(self, snapshot: Snapshot) -> None:
        """Others that join in the run's first epochs are told who began it."""
        if snapshot.items[0].step is None:
            self._store.set_meta(FOUNDER, self._founder)

    def repair(self, snapshot: Snapshot, items: Iterable[LogItem]) -> None:
        """The training process's parameters are damaged: it takes those that came, and the steps behind them."""
        self._note_taken()
        self._tell(self._load_message(snapshot, self._store.state_path(snapshot.head.lineage), items, "damaged"))

    def _note_taken(self) -> None:
        """The state that came is of use: a restart may begin with it."""
        if self._taken is not None:
            (snapshot, digest), self._taken = self._taken, None
            self._note(snapshot, digest)

    # --- given to others ---

    async def offer(self, wanted: OfferWanted) -> State | None:
        """For a peer that asks: the state of which it has a part, or the newest, unless so many entries came since that
        the log may forget them: then it is written anew. None: there is none.

        To a peer that has the run's initial parameters, a few steps behind these are less to carry. For one that
        replays no steps a state is written, as often as every NEWEST_EVERY; and for one that needs a state behind the
        fork of two branches, if there is none.
        """
        core = self._core()
        log = core.log
        if log is None or core.phase is Phase.LEAVING:
            return None
        beginning = Snapshot(log.items[:1], Accounts())
        if wanted.wanted == FRESH and len(log.items) <= FEW_STEPS and is_beginning(beginning):
            return State(beginning, None)
        if wanted.wanted == NEWEST:
            return await self._offer_latest(wanted.root)
        behind = items_behind(log.items, wanted.fork)
        of_use = None if behind is None else {item.head.lineage for item in behind}
        begun = [lineage for lineage, file in self._files.items() if file.root == wanted.root]
        begun = [each for each in begun if self._is_near(each) and (of_use is None or each in of_use)]
        if begun and (state := await self._state_at(begun[0])) is not None:
            return state
        newest = self._store.newest_state()
        if newest is None or not self._is_near(newest[0].head.lineage):
            try:
                await asyncio.wait_for(asyncio.shield(self._ask(ON_GRID)), WRITTEN_WITHIN)
            except asyncio.TimeoutError:
                return None
            newest = self._store.newest_state()
        if newest is None:
            return None
        lineage = newest[0].head.lineage
        if of_use is not None and lineage not in of_use:
            return await self._offer_latest(wanted.root)
        return await self._state_at(lineage)

    def _is_near(self, lineage: bytes) -> bool:
        """Return whether a peer with the state of this lineage can take the steps since."""
        log = self._core().log
        behind = items_behind(log.items, lineage) if log is not None else None
        return behind is not None and len(behind) <= self._kept_entries // 4

    async def _offer_latest(self, root: bytes) -> State | None:
        async with self._asking:
            latest = self._latest
            if latest is None or not self._is_latest(latest, root):
                self._latest_at = time.monotonic()
                try:
                    asked = asyncio.shield(self._ask(FOR_OBSERVERS))
                    latest = await self._keep_latest(await asyncio.wait_for(asked, WRITTEN_WITHIN))
                except (asyncio.TimeoutError, OSError):
                    return None
            return self._as_of_now(latest) if latest is not None else None

    def _is_latest(self, state: State, root: bytes) -> bool:
        """Return whether to give this state once more, to a peer that has a part of the state with this root."""
        log, lineage, file = self._core().log, state.snapshot.head.lineage, state.file
        is_last = log is not None and log.last.head.lineage == lineage
        is_new = is_last or time.monotonic() - self._latest_at <= NEWEST_EVERY
        return file is not None and self._is_near(lineage) and (is_new or file.root == root)

    async def _keep_latest(self, message: StateWritten) -> State | None:
        """Raises OSError."""
        snapshot = self.heads.get(message.lineage)
        if message.error or snapshot is None:
            return None
        path = self._store.state_path(FOR_OBSERVERS + message.lineage)
        message.path.replace(path)
        before = self._latest.file if self._latest is not None else None
        self._latest = State(snapshot, await asyncio.to_thread(chunked_file, path), message.digest)
        if before is not None and before.path != path:
            before.path.unlink(missing_ok=True)
        return self._latest

    async def _state_at(self, lineage: bytes) -> State | None:
        file, noted = await self._file_of(lineage), self._store.noted_state(lineage)
        return self._as_of_now(State(noted[0], file, noted[1])) if file is not None and noted is not None else None

    def _as_of_now(self, state: State) -> State | None:
        """With what the log, which may have gone on, still has of the state's own; None: it has forgotten the state."""
        log, snapshot = self._core().log, state.snapshot
        if log is None or snapshot.head.lineage not in log:
            return None
        # of what the log has forgotten since, the signatures are forgotten too
        items = tuple(item for item in snapshot.items if item.head.lineage in log)
        return state._replace(snapshot=Snapshot(items, snapshot.accounts))

    async def _file_of(self, lineage: bytes) -> ChunkedFile | None:
        """The state at this lineage that is on the disk, with its hashes; None: there is none."""
        async with self._hashing:
            if self._store.state_digest(lineage) is None:
                self._files.pop(lineage, None)
                return None
            if lineage not in self._files:
                try:
                    file = await asyncio.to_thread(chunked_file, self._store.state_path(lineage))
                except OSError:
                    return None
                self._files = {each: known for each, known in self._files.items() if known.path.exists()}
                self._files[lineage] = file
            return self._files[lineage]

    def chunked(self, root: bytes) -> ChunkedFile | None:
        """The file with this root; None: it is not here. One that was offered, or testified, is known."""
        latest = self._latest.file if self._latest is not None else None
        files = [*self._files.values(), *([latest] if latest is not None else [])]
        return next((file for file in files if file.root == root and file.path.exists()), None)

    def proof_of(self, snapshot: Snapshot) -> bytes:
        """Return the proof that a snapshot's log is the run's."""
        founder = self._store.meta(FOUNDER) or b""
        return encode(Proof(self._signatures.export(snapshot.items), founder))


def _roots(said: dict[str, Testimony], size: int) -> dict[str, bytes]:
    """The roots of those that have a state of this size at the lineage, settled or not."""
    return {peer: each.root for peer, each in said.items() if each.root and each.size == size}


def is_beginning(snapshot: Snapshot) -> bool:
    """Return whether it is a run's beginning with the initial parameters, which every peer of the run can make."""
    item = snapshot.items[0]
    return len(snapshot.items) == 1 and item.step is None and item == LogItem.genesis(item.membership.view.values())
