"""Keep processes that hivemind forks from using or holding what they inherit."""

from __future__ import annotations

import asyncio
import copy
import gc
import multiprocessing
import os
import queue
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import InvalidStateError
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

import hivemind
import hivemind.dht.dht
import hivemind.dht.node
import torch
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.validation import RecordValidatorBase
from hivemind.utils import MPFuture, get_logger

from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.net import shared_futures
from volunteer_kit.swarm.net.access.control import Admission
from volunteer_kit.swarm.net.access.dht_auth import AdmittedDHTProtocol
from volunteer_kit.swarm.net.bounded_names import bound_names
from volunteer_kit.swarm.net.children import LastWords, PeerProcesses
from volunteer_kit.swarm.net.daemon_link import DaemonLink
from volunteer_kit.swarm.net.dht import OPTIONS, ThriftyDHTNode
from volunteer_kit.swarm.net.fork_context import FORK
from volunteer_kit.swarm.net.log_limits import bound_logs
from volunteer_kit.swarm.net.serializer import DecodableValidator, bound_serializer
from volunteer_kit.swarm.net.sockets import make_socket_folder
from volunteer_kit.swarm.net.streams import bound_streams
from volunteer_kit.swarm.net.taken_identity import AnyFamilyP2P

logger = get_logger(__name__)

LARGE = 2**20  # bytes
_inherited: list[torch.Tensor] = []  # in a fork: what its parent had
_frozen: list[weakref.ref[torch.Tensor]] = []  # the collector no longer lists them


def forget_inherited_tensors() -> None:
    """Give back the parent's tensors that are not shared memory. To be called first in a forked process.

    A fork has its parent's memory page by page until one of them writes: the parent soon rewrites model, gradients and
    statistics, and their old pages would stay in every forked process, 1.5 GB in each for the original's model.
    """
    while _inherited:
        thing = _inherited.pop()
        with suppress(RuntimeError):  # no plain memory, or not torch's own
            if thing.untyped_storage().nbytes() >= LARGE and not thing.is_shared():
                thing.untyped_storage().resize_(0)


def _before_fork() -> None:
    """Look for tensors here, not in the fork, and let no collector walk over the objects there: to look at an object
    is to write its reference count, and 100 MB of Python's own pages would be copied into each process. What is frozen
    stays so: the collection before the next fork would write the pages that the last one shares."""
    gc.collect()
    found = (thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter))
    _frozen.extend(weakref.ref(tensor) for tensor in found if tensor.device.type == "cpu")
    _frozen[:] = [reference for reference in _frozen if reference() is not None]
    _inherited[:] = [tensor for tensor in (reference() for reference in _frozen) if tensor is not None]
    gc.freeze()


os.register_at_fork(before=_before_fork, after_in_parent=_inherited.clear)


def hold_tasks(module: ModuleType) -> None:
    """Let no task of the loop that `module` will make be collected. To be called first in a forked process.

    hivemind lets go of its tasks, asyncio itself knows them weakly only, and a connection knows its reader no better:
    when the collector passes by while one waits for p2pd's answer, it takes both. The task is gone, and who asked for
    it waits for ever: one worker in some hundreds never came up.
    """
    make_loop, held = module.switch_to_uvloop, set()

    def start(loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> asyncio.Task:
        task = asyncio.Task(coroutine, loop=loop, **kwargs)
        held.add(task)
        task.add_done_callback(held.discard)
        return task

    def make_holding_loop() -> asyncio.AbstractEventLoop:
        loop = make_loop()
        loop.set_task_factory(start)
        return loop

    module.switch_to_uvloop = make_holding_loop


def end_with_parent() -> None:
    """To be called first in a forked process: where its parent is killed, it would go on for ever."""

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, name="end_with_parent", daemon=True).start()


class Inbox:
    """A forked process's end of its pipe, whole orders only, read by a thread.

    An order carries a pipe for its answer, which is fetched from its sender: the process would stand still until a
    thread of a busy program has handed it over, two seconds at times. uvloop watches the pipe and so makes it
    non-blocking: an order that comes in two pieces, as all do that are longer than 16 KB, is broken off on busy cores,
    its rest is read as the next one, and the process dies. And the order of somebody who has ended meanwhile cannot be
    read: hivemind stands still for 5 s after each, is killed where it should end in that time, and dies where the other
    ends in the middle of handing it over (EOFError). The thread skips such an order.

    To be made in the process that reads.
    """

    def __init__(self, pipe: Connection):
        self._pipe = pipe
        self.send = pipe.send
        self._orders: queue.SimpleQueue[tuple[str, list, dict]] = queue.SimpleQueue()
        self._read_here, self._came = FORK.Pipe(duplex=False)  # one message for each order
        self.fileno = self._read_here.fileno
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def poll(self) -> bool:
        """Is there an order?"""
        return self._read_here.poll()

    def recv(self) -> tuple[str, list, dict]:
        """The next order, which `poll` has announced."""
        self._read_here.recv_bytes()
        return self._orders.get()

    def _read(self) -> None:
        while True:
            try:
                order = self._pipe.recv_bytes()
            except (OSError, EOFError):  # closed
                return
            try:
                self._orders.put(ForkingPickler.loads(order))
            except (OSError, EOFError, RuntimeError, multiprocessing.AuthenticationError):  # its sender is gone
                continue
            except Exception as e:  # it names what was defined after the fork; the process goes on
                logger.warning(f"An order cannot be read: {e!r}")
                continue
            self._came.send_bytes(b"")


class Outbox:
    """The other end, for several threads: the pieces of two long orders would be mixed. When the process at the other
    end has died, all that wait for its answers are told."""

    def __init__(self, pipe: Connection):
        self._pipe, self._lock, self._pid = pipe, threading.Lock(), os.getpid()
        self.fileno, self.close = pipe.fileno, pipe.close
        self._awaited: weakref.WeakSet[MPFuture] = weakref.WeakSet()
        self._error: SwarmError | None = None

    def send(self, order: tuple[str, list, dict]) -> None:
        """Raises SwarmError (broken) once the process has died."""
        if self._pid != os.getpid():  # in a fork: a thread of the parent may have held the lock
            self._lock, self._pid = threading.Lock(), os.getpid()
        self._raise_if_broken()
        with self._lock:
            self._awaited.update(part for part in (*order[1], *order[2].values()) if isinstance(part, MPFuture))
            self._pipe.send(order)
        self._raise_if_broken()

    def break_off(self, error: SwarmError) -> None:
        """Fail what waits for an answer, and all orders to come."""
        self._error = error
        is_free = self._lock.acquire(timeout=2.0)  # s; a sender may be stuck in a full pipe
        for future in list(self._awaited):
            fail(future, error)
        if is_free:
            self._lock.release()

    def _raise_if_broken(self) -> None:
        if self._error is not None:
            raise copy.copy(self._error)


def fail(future: MPFuture, error: SwarmError) -> None:
    """Unless it has its answer."""
    with suppress(InvalidStateError):
        if not future.done():
            future.set_exception(copy.copy(error))  # several threads may raise theirs


class LeanDHT(hivemind.DHT):
    """hivemind.DHT whose process keeps nothing of the model, and speaks with admitted peers only.

    :param admission: who may take part; shared with all processes of this peer
    :ivar processes: this peer's; its node is among them
    :ivar sockets: where they meet
    """

    def __init__(self, *args, admission: Admission, record_validators: Iterable[RecordValidatorBase] = (), **kwargs):
        for bound in (bound_serializer, bound_streams, bound_names, bound_logs):
            bound()  # for all processes of this peer: they are forked from here
        self.admission, self.processes, self.sockets = admission, PeerProcesses(), make_socket_folder()
        self.last_words = LastWords()
        shared_futures.begin_to_use(self)
        # without the first one a node that only is the address refuses all that volunteers sign, for not decodable
        validators = [*record_validators, RSASignatureValidator(), DecodableValidator()]
        super().__init__(*args, record_validators=validators, **{**OPTIONS, **kwargs})

    def start(self) -> None:
        self._outer_pipe = Outbox(self._outer_pipe)
        super().start()
        self.processes.add(self, "The process that talks to the swarm")
        self.processes.add_shared_memory_manager()

    def shutdown(self) -> None:
        self.processes.close()
        if self.processes.why_broken is None:
            super().shutdown()
        self.sockets.remove()
        shared_futures.end_use(self)

    def break_off(self, error: SwarmError) -> None:
        """Its process has died: fail the calls that wait for it, and all to come."""
        self._inner_pipe.close()
        self._outer_pipe.break_off(error)
        fail(self._ready, error)

    def run(self) -> None:
        end_with_parent()
        forget_inherited_tensors()
        hold_tasks(hivemind.dht.dht)
        self._inner_pipe = Inbox(self._inner_pipe)
        asyncio.subprocess.create_subprocess_exec = DaemonLink(self.last_words, self.sockets).start_daemon
        hivemind.dht.node.DHTProtocol = AdmittedDHTProtocol.set_up(self.admission)
        hivemind.dht.dht.DHTNode = ThriftyDHTNode
        hivemind.dht.node.P2P = AnyFamilyP2P
        super().run()
