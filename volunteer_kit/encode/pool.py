"""Workers: processes that make one shard at a time each and die with their parent."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection, reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from volunteer_kit.data.errors import DataError
from volunteer_kit.data.shards import shown
from volunteer_kit.data.source import ShardError
from volunteer_kit.encode.folder import Summary, Target
from volunteer_kit.encode.settings import Settings


class Plan(NamedTuple):
    """What this machine chose for itself."""

    workers: int  # processes
    threads: int  # of each; with another number the rarest codes may be rounded otherwise, so a command keeps its own
    device: str  # "cpu" or "cuda"


class Moved(NamedTuple):
    """A worker has written a batch: what its shard holds by now."""

    shard: str
    records: int
    left_out: int


class Done(NamedTuple):
    """A shard is finished, now or earlier."""

    shard: str
    summary: Summary


class Unreadable(NamedTuple):
    """A shard that cannot be read, or not further, at present."""

    shard: str
    cause: str
    message: str


class _Failed(NamedTuple):
    """A worker that cannot go on, for a reason that a person can mend, or for a bug (`is_bug`)."""

    message: str
    is_bug: bool


Event = Moved | Done | Unreadable


class _Inherited:
    """A file descriptor that a spawned process gets as well."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __getstate__(self) -> Any:
        return reduction.DupFd(self._descriptor)

    def __setstate__(self, state: Any) -> None:
        self._descriptor = state.detach()


def encode_shards(goals: dict[str, Target], settings: Settings, plan: Plan, lock: int) -> Iterator[Event]:
    """Make every shard; what happens is told as it happens. Raises DataError if a worker cannot go on; then, and when
    the iteration is left, every worker is killed."""
    waiting = deque(goals.items())
    busy: dict[Connection, tuple[BaseProcess, str]] = {}
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(_worker(settings, plan, lock)) for _ in range(min(plan.workers, len(goals)))]
        while waiting or busy:
            while free and waiting:
                process, pipe = free.pop()
                shard, target = waiting.popleft()
                busy[pipe] = process, shard
                with contextlib.suppress(BrokenPipeError):  # it ended at its start; reading tells
                    pipe.send((shard, target))
            for pipe in connection.wait(list(busy)):
                process, shard = busy[pipe]
                event = _receive(pipe, process, shard)
                if not isinstance(event, Moved):
                    del busy[pipe]
                    free.append((process, pipe))
                yield event


@contextlib.contextmanager
def _worker(settings: Settings, plan: Plan, lock: int) -> Iterator[tuple[BaseProcess, Connection]]:
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, settings, plan, _Inherited(lock)), name="encode", daemon=True)
    with _deaf_to_ctrl_c():
        process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """A process that is started inherits being deaf to it: only the parent speaks when a person stops the command."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)


def _receive(pipe: Connection, process: BaseProcess, shard: str) -> Event:
    try:
        event = pipe.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        code = process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise DataError(
            f"The worker that encoded {shown(shard)} {how}. What is finished stays.\n"
            "1. If memory ran out (dmesg | tail), take fewer workers: --workers 1\n"
            "2. Run the same command again: it goes on where it stopped."
        ) from None
    if isinstance(event, _Failed):
        raise (RuntimeError if event.is_bug else DataError)(event.message)
    return event


def _work(pipe: Connection, settings: Settings, plan: Plan, lock: _Inherited) -> None:
    """A worker's life."""
    _die_with_parent()
    try:
        _encode_until_told(pipe, settings, plan)
    except EOFError:
        return
    except BaseException as error:
        text = _in_words(error)
        with contextlib.suppress(OSError):
            pipe.send(_Failed(text or traceback.format_exc(), is_bug=text is None))


def _encode_until_told(pipe: Connection, settings: Settings, plan: Plan) -> None:
    import torch

    from volunteer_kit.encode.shard import encode_shard
    from volunteer_kit.model.image_tokenizer import load_image_tokenizer

    torch.set_num_threads(plan.threads)
    torch.backends.cudnn.allow_tf32 = False  # a GPU's codes shall be a CPU's, but for the rarest
    tokenizer = load_image_tokenizer(settings.tokenizer).to(plan.device)
    threads = ThreadPoolExecutor(plan.threads) if plan.threads > 1 else None
    while True:
        shard, target = pipe.recv()
        try:
            summary = encode_shard(
                shard,
                target,
                settings,
                lambda images: tokenizer.encode(images.to(plan.device)),
                threads=threads,
                tell=lambda records, left_out, shard=shard: pipe.send(Moved(shard, records, left_out)),
            )
        except ShardError as error:
            pipe.send(Unreadable(shard, error.cause, str(error)))
        else:
            pipe.send(Done(shard, summary))


def _in_words(error: BaseException) -> str | None:
    """What a person can mend; None for a bug."""
    if type(error).__module__.startswith("volunteer_kit"):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            "The disk with the code shards is full. What was written is kept.\n"
            "1. Make room: df -h\n2. Run the same command again: it goes on where it stopped."
        )
    if isinstance(error, OSError) and error.strerror:
        place = f" {Path(os.fsdecode(error.filename))}" if error.filename else ""
        return (
            f"The code shards cannot be written:{place} {error.strerror}.\n"
            "1. Mend that, and run the same command again: it goes on where it stopped."
        )
    return None


def _die_with_parent() -> None:
    """However the parent ends: a worker alone would write into files that a new one works on."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
