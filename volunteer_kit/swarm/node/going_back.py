"""Follow the monitor's rollback order: fetch the checkpoint's state, which few peers have.

The core takes an order at once. Steps behind it wait here until the state is on the disk; the device waits as long,
because its work meanwhile would be lost. The order names the SHA-256 of the state's file, so anybody may give it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import re
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Final

from volunteer_kit.swarm.node.talk import Checked, Compute, Downloading, Load, Step, StepOf, Told
from volunteer_kit.swarm.node.transfers import CheckpointWanted, TransferFailed, Transfers
from volunteer_kit.swarm.sync.entries import RollbackOrder

logger = logging.getLogger(__name__)

CHECKPOINTS: Final = "checkpoints"  # folder, in the node's
ASK_AGAIN: Final = 2.0  # s until everybody is asked again; it doubles
RARELY: Final = 30.0  # s, the longest of these pauses
OPENS_WITHIN: Final = 8.0  # s for a channel to another peer
KEPT: Final = 2  # states of orders
READ: Final = 2**20  # bytes that are hashed at a time
WAITS: Final = (
    "The run's host has ordered everybody back, and nobody has given this machine the model of that time yet ({why}). "
    "It goes on asking, and computes nothing meanwhile."
)

_NAME = re.compile(r"((?:[0-9a-f]{2})+)\.([0-9a-f]{64})\.safetensors")

Check = Callable[[Path], Awaitable[Checked | str]]  # why a state cannot be used, or what it is


class GoingBack:
    """A node's way back to the state that an order names.

    :param folder: of the states of orders, as `checkpoint_file` names them
    :param sources: peers to ask
    :param check: lets the training process look at a file
    :param tell: hands a message to the training process
    :param spawn: runs a coroutine in a task that is held
    :param ask_again: s
    :param on_state: told the file of an order's state when it is here, before the training process is
    """

    def __init__(
        self,
        folder: Path,
        transfers: Transfers,
        sources: Callable[[RollbackOrder], Iterable[str]],
        check: Check,
        tell: Callable[[Any], None],
        spawn: Callable[[Any], asyncio.Task[None]],
        ask_again: float = ASK_AGAIN,
        on_state: Callable[[Path], None] = lambda path: None,
    ):
        self._folder, self._transfers, self._sources = folder, transfers, sources
        self._check, self._tell, self._spawn, self._ask_again = check, tell, spawn, ask_again
        self._on_state = on_state
        self._files = _files_in(folder)  # (lineage, SHA-256) -> the state; the newest last
        self._waiting: list[Step] | None = None  # steps behind the order; None: none is being followed
        self._fetching: asyncio.Task[None] | None = None
        self._computes = True

    # --- the states of orders ---

    def keep(self, lineage: bytes, digest: bytes, path: Path) -> None:
        """The state of this lineage is in this file, whose SHA-256 it is. Those of long ago are deleted."""
        self._files.pop((lineage, digest), None)
        self._files[lineage, digest] = path
        for key in [*self._files][:-KEPT]:
            self._files.pop(key).unlink(missing_ok=True)

    def file_of(self, lineage: bytes, digest: bytes) -> Path | None:
        """The state that an order names; None: it is not here."""
        path = self._files.get((lineage, digest))
        return path if path is not None and path.is_file() else None

    # --- what the training process is told ---

    def step(self, message: Step) -> None:
        """A step is committed: tell it, now or when the state that it leads on from is here."""
        if self._waiting is None:
            self._tell(message)
        else:
            self._waiting.append(message)

    def compute(self, on: bool) -> None:
        """Whether the core lets the device compute."""
        self._computes = on
        self._tell(Compute(on and self._waiting is None))

    def follow(self, order: RollbackOrder, step: StepOf) -> None:
        """The core follows this order, and no longer any before."""
        self.give_up()
        self._waiting = []
        self._tell(Compute(False))
        self._fetching = self._spawn(self._go_back(order, step))

    def give_up(self) -> None:
        """Parameters come from somewhere else: a snapshot, or another order."""
        if self._waiting is not None:
            self._waiting = None
            self._tell(Compute(self._computes))
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None

    async def _go_back(self, order: RollbackOrder, step: StepOf) -> None:
        path, epoch = await self._state_of(order)
        waiting, self._waiting = self._waiting, None
        self._fetching = None
        self._on_state(path)
        self._tell(Load(order.parent, epoch, path, (step,), "rollback"))
        for message in waiting or ():
            self._tell(message)
        self._tell(Compute(self._computes))

    async def _state_of(self, order: RollbackOrder) -> tuple[Path, int]:
        """The file of an order's state, and its epoch; waits until somebody gives it."""
        wanted, pause, has_told = CheckpointWanted(order.parent, order.state), self._ask_again, False
        while True:
            why = "nobody is here"
            for source in ("", *self._sources(order)):
                try:
                    return await self._state_from(source, wanted)
                except TransferFailed as error:
                    logger.info("No state to go back to came from %s: %s", source or "this disk", error)
                    why = str(error)
            if not has_told:
                has_told = True
                self._tell(Told("warning", WAITS.format(why=why)))
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, RARELY)

    async def _state_from(self, source: str, wanted: CheckpointWanted) -> tuple[Path, int]:
        """From a peer, or "": from what is here. Raises TransferFailed."""
        path = self.file_of(*wanted)
        if path is not None and not await asyncio.to_thread(_is_whole, path, wanted.digest):
            del self._files[wanted.lineage, wanted.digest]
            path = None
        if path is None:
            if not source:
                raise TransferFailed("it is not here")
            path = checkpoint_file(self._folder, *wanted)
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                await self._transfers.fetch_checkpoint(wanted, source, path, OPENS_WITHIN, self._tell_download)
            except OSError as error:
                raise TransferFailed(f"{path} cannot be written: {error.strerror or error}") from error
        found = await self._check(path)
        if isinstance(found, str):
            raise TransferFailed(found)
        if found.lineage != wanted.lineage:
            raise TransferFailed("it is another state than the order says")
        if source:
            self.keep(*wanted, path)
        return path, found.epoch

    def _tell_download(self, done: int, total: int) -> None:
        self._tell(Downloading(done, total))


def checkpoint_file(folder: Path, lineage: bytes, digest: bytes) -> Path:
    """Return the path of the state with this lineage and SHA-256."""
    return folder / f"{lineage.hex()}.{digest.hex()}.safetensors"


def _files_in(folder: Path) -> dict[tuple[bytes, bytes], Path]:
    """States that an earlier process left; their bytes are looked at when they are of use."""
    paths = sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
    named = [(match, path) for path in paths if (match := _NAME.fullmatch(path.name))]
    return {(bytes.fromhex(match[1]), bytes.fromhex(match[2])): path for match, path in named}


def _is_whole(path: Path, digest: bytes) -> bool:
    found = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(READ):
                found.update(block)
    except OSError:
        return False
    return found.digest() == digest
