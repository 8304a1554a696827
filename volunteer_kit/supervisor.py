"""Start a worker process, read its events, restart it after a crash, end it without leaving anything behind."""

from __future__ import annotations

import atexit
import io
import os
import queue
import secrets
import signal
import subprocess
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from volunteer_kit.home import cut_log, open_log
from volunteer_kit.process_group import kill_all, start, wait_for_exit
from volunteer_kit.storage.socket_folders import remove_stale_folders
from volunteer_kit.training.protocol import BROKEN, OFFLINE, RENEW, FinishAt, Leave, WorkerSpec, parse_event
from volunteer_kit.worker_end import MemoryWatch, WorkerEnd

Event = dict[str, Any]

QUEUE_LIMIT = 10_000  # events; beyond it the frequent ones are dropped, for a caller that never reads
LINE_LIMIT = 2**20  # bytes; longer output is no event
LOG_LOOK = 60.0  # s between two looks at the log's length
LOGGED = 2000  # bytes of a line of output that is no event
MAX_BACKOFF = 60.0  # s
SIGTERM_GRACE = 5.0  # s between SIGTERM and SIGKILL
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN")  # environments are listed by `ps e`

_live: weakref.WeakSet[Supervisor] = weakref.WeakSet()


class Supervisor:
    """One worker process at a time, for as long as it takes.

    :param spec: what it is to do; None: it starts, loads its libraries and waits for begin()
    :param log_path: the worker's stderr and whatever it prints that is no event are appended here.
    :param restart: start the worker again after a crash, and as often as the line is dead.
    :param max_restarts: crashes in a row without one applied epoch between them before giving up.
    :param module: what `python -m` runs.
    :param backoff: s before the first restart; doubles with each crash in a row, up to a minute. A worker of which a
        process has died (exit code BROKEN) is started again at once the first time.
    :param root: where /proc and /sys are: a worker that the kernel killed for memory is followed by one with a smaller
        plan, or by none if there is no smaller one

    Beside the worker's events (training/protocol.py) it has two of its own: "restarting" (exit_code, delay, restarts,
    message) and "gave_up" (exit_code, restarts, message). The worker has a session of its own, so Ctrl-C reaches the
    supervisor alone. If the supervising process is killed the worker sees its stdin end and leaves by itself.

    The main thread uses only locks and queues written in C: KeyboardInterrupt inside Python's own Condition or Event
    can leave their lock taken forever.
    """

    def __init__(
        self,
        spec: WorkerSpec | None,
        *,
        log_path: str | Path,
        restart: bool = True,
        max_restarts: int = 10,
        module: str = "volunteer_kit.worker",
        backoff: float = 1.0,
        root: Path = Path("/"),
    ):
        self.spec, self.log_path, self.module = spec, Path(log_path), module
        self.restart, self.max_restarts, self.backoff = restart, max_restarts, backoff
        self.restarts = 0  # workers started after the first one
        self.exit_code: int | None = None  # of the last worker that ended; negative: killed by that signal
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None: nothing comes any more
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # cuts the wait before a restart short
        self._specs: queue.SimpleQueue[WorkerSpec | None] = queue.SimpleQueue()  # of begin(); None: there will be none
        self._process: subprocess.Popen[bytes] | None = None
        self._process_lock = threading.Lock()  # guards _process: no signal to a pid that was given back
        self._write_lock = threading.Lock()  # one line at a time into the worker's stdin
        self._thread: threading.Thread | None = None
        self._done = False
        self._until_done = threading.Lock()  # held until the last worker is gone
        self._stopping = False
        self._finish: FinishAt | None = None
        self._has_spec = False  # the present worker: its first line is the spec, whatever it is told meanwhile
        self._error = self._error_kind = ""  # the newest "error" event's message and kind
        self._samples = (0, 0)  # of workers that have ended, of the present one; replaced as a whole
        self._progressed = False  # the present worker took part in an epoch
        self._connected = False  # some worker has met the swarm
        self._root, self._memory = root, MemoryWatch(root)
        self._plan: Event = {}  # the present worker's, as last told

    # what it is doing -------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether there is a worker, or will be one again after a pause."""
        return self._thread is not None and not self._done

    @property
    def pid(self) -> int | None:
        """The present worker's; None between two workers."""
        process = self._process
        return process.pid if process else None

    @property
    def total_samples(self) -> int:
        """Samples that entered applied epochs, over all restarts."""
        return sum(self._samples)

    def next_event(self, timeout: float | None = None) -> Event | None:
        """The next event in order; None after `timeout` s without one, and at once when no more can come."""
        if self._done and self._events.empty():  # an interrupt may have swallowed the last None
            return None
        try:
            event = self._events.get(timeout=timeout) if timeout is None or timeout > 0 else self._events.get(False)
        except queue.Empty:
            return None
        if event is None:
            self._events.put(None)
        return event

    # what it can be told ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the worker; returns at once. Raises RuntimeError if it was started before."""
        if self._thread is not None:
            raise RuntimeError("a Supervisor is started once; make a new one")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._until_done.acquire()
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        _live.add(self)
        self._thread.start()

    def begin(self, spec: WorkerSpec) -> None:
        """What the worker is to do, if that was not known before."""
        self._specs.put(spec)

    def send(self, command: FinishAt | Leave) -> bool:
        """Pass a command to the worker; False if there is none to take it. FinishAt is repeated after a restart."""
        if isinstance(command, FinishAt):
            self._finish = command
        return self._write(command.model_dump_json())

    def finish_at(self, epoch: int) -> bool:
        """Train until this epoch, save, then go on sharing the state; "finished" tells when."""
        return self.send(FinishAt(epoch=epoch))

    def begin_leave(self, timeout: float = 30.0) -> None:
        """As leave(), without waiting: events go on arriving until the worker is gone."""
        if self.running and not self._stopping:
            self._stop_restarting()
            threading.Thread(target=self._escalate, args=(timeout,), daemon=True).start()

    def leave(self, timeout: float = 30.0) -> bool:
        """Ask the worker to leave; after `timeout` s SIGTERM, 5 s later SIGKILL. True if it left by itself.

        Returns when every process of the worker is gone. KeyboardInterrupt passes through; call close() then.
        """
        if self._thread is None:
            return True
        self._stop_restarting()
        self._escalate(timeout)
        return self.exit_code == 0

    def kill(self) -> None:
        """SIGKILL the worker process only, as a fault: it is cleaned up after and restarted."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """End everything at once, by SIGKILL, and wait until it is gone. May be called again and again."""
        if self._thread is None:
            return
        self._stop_restarting()
        self._signal(signal.SIGKILL)
        self._wait_until_done(30.0)

    def __enter__(self) -> Supervisor:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None or issubclass(kind, KeyboardInterrupt):
                self.leave()
        finally:
            self.close()

    # the supervising thread -------------------------------------------------------------------------

    def _supervise(self) -> None:
        crashes = outages = 0  # in a row
        try:
            while True:
                self._progressed, self._error, self._error_kind = False, "", ""
                if not self._run_worker() or self.exit_code == 0 or self._stopping:
                    return
                if self.exit_code == RENEW and self._progressed:
                    continue
                if self._progressed:
                    crashes = outages = 0
                if self.exit_code == OFFLINE:
                    outages += 1
                else:
                    crashes += 1
                was_killed = self.exit_code == -signal.SIGKILL
                was_killed |= self.exit_code == BROKEN and "(SIGKILL)" in self._error
                lack = self._memory.lack(self._plan) if was_killed else None
                end = WorkerEnd(self.exit_code, self._error, self._error_kind, lack)
                smaller = lack.smaller(self.spec) if lack is not None and self.spec is not None else self.spec
                may_follow = end.may_be_followed(crashes, self.max_restarts, self._connected)
                if not (self.restart and may_follow and (lack is None or smaller is not None)):
                    self._tell("gave_up", message=end.why_given_up(crashes, self.log_path))
                    return
                in_a_row = outages if self.exit_code == OFFLINE else crashes
                delay = min(MAX_BACKOFF, self.backoff * 2 ** (min(in_a_row, 10) - 1))
                if in_a_row == 1 and (self.exit_code == BROKEN or self._progressed):
                    delay = 0.0
                self.restarts += 1
                self.spec = smaller
                how = end.in_words()
                when = f"in {delay:.0f} s" if delay else "at once"
                when += " with a smaller plan" if lack is not None else ""
                message = f"{how[0].upper()}{how[1:]}; the worker starts again {when}."
                self._tell("restarting", delay=delay, message=message)
                with suppress(queue.Empty):
                    self._wake.get(timeout=delay)
        finally:
            self._done = True
            self._events.put(None)
            self._until_done.release()

    def _run_worker(self) -> bool:
        """One worker from start to end, its remains included. False if it was not to be started any more."""
        mark = f"VOLUNTEER_KIT_WORKER={secrets.token_hex(16)}"
        with open_log(self.log_path) as log:
            with self._process_lock:
                if self._stopping:
                    return False
                try:
                    self._memory, self._plan = MemoryWatch(self._root), {}
                    process = start(self.module, mark, without=SECRETS, stderr=log, bufsize=0)
                    self._has_spec = False
                    self._process = process
                except OSError as error:
                    self.exit_code, self._error = None, f"it could not be started: {error}"
                    return True
            reader = threading.Thread(target=self._read, args=(process, log), name="worker events", daemon=True)
            ended = threading.Event()
            for thread in (reader, threading.Thread(target=self._bound_log, args=(ended,), daemon=True)):
                thread.start()
            self.spec = self.spec or self._specs.get()
            if self.spec is None:
                self._signal(signal.SIGKILL)
            else:
                self._write(self._spec_to_write(self.spec), is_spec=True)
            if self._finish:
                self._write(self._finish.model_dump_json())
            if self._stopping:
                self._write(Leave().model_dump_json())
            wait_for_exit(process)
            ended.set()
            kill_all(process.pid, mark)
            remove_stale_folders()
            reader.join(timeout=5)  # its last events count while it is still the worker
            with self._process_lock:
                self._process = None
            self.exit_code = process.wait()
            if process.stdin:
                process.stdin.close()
        self._samples = (self.total_samples, 0)
        return True

    def _spec_to_write(self, spec: WorkerSpec) -> str:
        """With the token that the environment has, if it has none of its own: the worker does not inherit it."""
        token = spec.hf_token or next(filter(None, map(os.environ.get, SECRETS)), None)
        return spec.model_copy(update={"hf_token": token}).model_dump_json()

    def _read(self, process: subprocess.Popen[bytes], log: io.FileIO) -> None:
        """Events of one worker into the queue; runs in a thread of its own until the worker's stdout ends."""
        assert process.stdout is not None
        with open(process.stdout.fileno(), "rb", closefd=False) as lines, process.stdout:
            while line := lines.readline(LINE_LIMIT):
                try:
                    event = parse_event(line.decode(errors="replace"))
                except (RecursionError, TypeError):  # json's answer to [[[[...
                    event = None
                if event is not None and process is self._process:
                    self._take(event)
                elif event is None:
                    with suppress(OSError, ValueError):  # a full disk is no reason to stop listening
                        log.write(line if len(line) <= LOGGED else line[:LOGGED] + b" ...\n")

    def _bound_log(self, ended: threading.Event) -> None:
        """Also of a worker that says nothing and logs a lot; runs in a thread of its own."""
        while not ended.wait(LOG_LOOK):
            with suppress(OSError):
                cut_log(self.log_path)

    def _take(self, event: Event) -> None:
        kind, total = event["event"], event.get("total_samples")
        if kind in ("epoch", "finished", "left") and type(total) is int:
            before, now = self._samples
            self._samples = (before, max(now, total))
        if kind in ("device", "plan"):
            self._plan = {**self._plan, **event}
        self._progressed |= kind == "epoch"
        self._connected |= kind == "state_loaded"
        if kind in ("error", "broken"):
            self._error, self._error_kind = str(event.get("message", "")), str(event.get("kind", ""))
        if self._events.qsize() < QUEUE_LIMIT or kind not in ("step", "skipped"):
            self._events.put(event)

    # plumbing ---------------------------------------------------------------------------------------

    def _tell(self, kind: str, **fields: Any) -> None:
        own = {"event": kind, "time": round(time.time(), 3), "exit_code": self.exit_code, "restarts": self.restarts}
        self._events.put(own | fields)

    def _write(self, line: str, is_spec: bool = False) -> bool:
        # A worker that hangs before it reads fills the pipe; leaving must not hang with it.
        if not self._write_lock.acquire(timeout=-1 if is_spec else 1.0):
            return False
        try:
            process = self._process
            if process is None or process.stdin is None:
                return False
            if not (is_spec or self._has_spec):
                return False  # commands are repeated after the spec
            self._has_spec = True
            data = memoryview(line.encode() + b"\n")
            while data:
                data = data[process.stdin.write(data) :]
            return True
        except (OSError, ValueError):  # it ended meanwhile
            return False
        finally:
            self._write_lock.release()

    def _signal(self, number: int) -> None:
        with self._process_lock:
            if self._process:
                os.kill(self._process.pid, number)

    def _stop_restarting(self) -> None:
        self._stopping = True
        self._wake.put(None)
        self._specs.put(None)

    def _escalate(self, timeout: float) -> None:
        self._write(Leave().model_dump_json())
        if self._wait_until_done(timeout):
            return
        self._signal(signal.SIGTERM)
        if not self._wait_until_done(SIGTERM_GRACE):
            self._signal(signal.SIGKILL)
            self._wait_until_done(30.0)

    def _wait_until_done(self, timeout: float) -> bool:
        if not self._done and self._until_done.acquire(timeout=timeout):
            self._until_done.release()
        return self._done


def _let_go_of_pipes() -> None:
    """In a forked child (hivemind's DHT is one): a copy of the pipe would keep the worker alive after its parent."""
    for supervisor in list(_live):
        process = supervisor._process
        for pipe in (process.stdin, process.stdout) if process else ():
            if pipe is not None and not pipe.closed:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, pipe.fileno())
                os.close(null)


@atexit.register
def _leave_all() -> None:
    for supervisor in list(_live):
        if supervisor.running:
            supervisor.leave(timeout=10)


os.register_at_fork(after_in_child=_let_go_of_pipes)
