"""One volunteer's stay in a run: a worker under supervision, and the picture of it. It goes on while nobody looks."""

from __future__ import annotations

import copy
import queue
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

from volunteer_kit.companion import Companion
from volunteer_kit.home import Home
from volunteer_kit.story import Story
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.training.protocol import WorkerSpec
from volunteer_kit.widgets.progress import Progress
from volunteer_kit.widgets.words import duration, size

SHOW_EVERY = 0.25  # s between two pictures
STATUS_EVERY = 1.0  # s between two writings of the status file
SHARE_FOR = 60.0  # s after the run's end in which others may still take the state
GOODBYE = "saying goodbye to the others"
PAUSED_BY_YOU = "press Resume to go on; what you gave stays counted"


class Stay:
    """The worker of one volunteer, from the first look at the run to the goodbye.

    A thread takes in what the worker tells, keeps the caps, and makes `progress`, a picture that is replaced as a
    whole and never changed; who shows it may come and go. All methods may be called from the main thread, where
    KeyboardInterrupt may strike at any line: it takes no locks of Python's own.

    :param progress: what is known before the worker has said anything
    :param max_hours: leave after so long
    :param max_gb: leave when so much was sent and received, 1e9 bytes of the model and gradients
    """

    def __init__(
        self,
        home: Home,
        progress: Progress,
        *,
        max_hours: float | None = None,
        max_gb: float | None = None,
        make_worker: Callable[..., Supervisor] = Supervisor,
    ):
        self.home, self.progress = home, copy.copy(progress)
        self.spec: WorkerSpec | None = None  # what the worker is to do, from begin() on
        self._story = Story(progress)
        self._max_seconds = self._max_bytes = float("inf")
        self.limit(max_hours, max_gb)
        self._make_worker = make_worker
        self._worker = make_worker(None, log_path=home.log)
        self._companion: Companion | None = None
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._leaving = self._paused = self._wants_back = self._closing = False
        self._has_work = self._misses_companion = False
        self._status_at = float("-inf")
        self._finished_at: float | None = None
        self._began = time.monotonic()
        self._over = threading.Lock()  # held until all is over; a lock of C's, which an interrupt cannot harm
        self._over.acquire()
        self._thread: threading.Thread | None = None

    # --- what it can be told ---

    def warm_up(self) -> None:
        """Let the worker load its libraries, which takes seconds, while the volunteer reads."""
        self._worker.start()

    def begin(self, spec: WorkerSpec, companion: Companion | None = None) -> None:
        """Train. With a companion, as soon as that is up; alone, if it does not come."""
        self.spec, self._companion, self._began = spec, companion, time.monotonic()
        self._story.progress.started = time.time()
        self._thread = threading.Thread(target=self._run, name="stay", daemon=True)
        self._thread.start()

    def limit(self, max_hours: float | None, max_gb: float | None) -> None:
        """New caps, which hold at once, from the stay's beginning on; None: that one stays as it is."""
        self._max_seconds = 3600 * max_hours if max_hours else self._max_seconds
        self._max_bytes = 1e9 * max_gb if max_gb else self._max_bytes

    def pause(self) -> None:
        """Leave the swarm in good order until resume()."""
        self._orders.put("pause")

    def resume(self) -> None:
        self._orders.put("resume")

    def leave(self) -> None:
        """Say goodbye; `over` tells when that is done."""
        self._orders.put("leave")

    def close(self) -> None:
        """End everything at once."""
        self._closing = self._leaving = True
        self._orders.put("leave")
        self._close_workers()
        if self._thread is not None:
            self._thread.join(timeout=30)
        self.home.unlock()

    @property
    def over(self) -> bool:
        return not self._over.locked()

    @property
    def worker_pid(self) -> int | None:
        return self._worker.pid

    # --- the thread ---

    def _run(self) -> None:
        with ExitStack() as ends:  # each of them happens, the last one first
            for end in (self._over.release, self.home.unlock, partial(self._show, now=True), self._close_workers):
                ends.callback(end)
            for part in (self._live, self._say_goodbye):
                try:
                    part()
                except Exception as error:
                    self._break(error)

    def _live(self) -> None:
        self._call_the_companion()
        while self._worker.running or (self._paused and self._story.progress.state != "failed"):
            if not self._worker.running:
                time.sleep(SHOW_EVERY)
            self._listen(SHOW_EVERY)
            self._obey()
            self._look_after_the_companion()
            self._come_back()
            self._keep_the_caps()
            self._show()
        self._listen(0)  # its last words

    def _listen(self, timeout: float) -> None:
        event = self._worker.next_event(timeout=timeout)
        while event is not None:
            self._story.take(event)
            if event["event"] == "finished" and self._finished_at is None:
                self._finished_at = time.monotonic()
            event = self._worker.next_event(timeout=0)
        if self._leaving and self._story.progress.state not in ("failed", "finished"):
            self._story.be("leaving", GOODBYE)

    def _obey(self) -> None:
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                break
            if order == "leave":
                self._begin_leave()
            elif order == "resume":
                self._wants_back = self._paused
            elif not self._leaving and self._finished_at is None:
                self._paused, self._wants_back = True, False
                self._begin_goodbye()
        if self._paused and self._story.progress.state != "failed":
            if self._companion is not None and not self._worker.running:
                self._companion.begin_leave()
            self._story.be("paused", GOODBYE if self._anybody_trains() else PAUSED_BY_YOU)

    def _begin_leave(self) -> None:
        if not self._leaving:
            self._leaving = True
            if self._story.progress.state not in ("finished", "failed"):
                self._story.be("leaving", GOODBYE)
        self._paused = False
        self._begin_goodbye()

    def _begin_goodbye(self) -> None:
        if self._has_work:
            self._worker.begin_leave()
        else:
            self._worker.close()  # it has met nobody

    def _anybody_trains(self) -> bool:
        return self._worker.running or (self._companion is not None and self._companion.running)

    def _come_back(self) -> None:
        """From a pause, once all have said goodbye."""
        if self._wants_back and self._paused and not self._anybody_trains():
            self._paused = self._wants_back = self._has_work = False
            self._worker = self._make_worker(None, log_path=self.home.log)
            self._worker.start()
            if self._closing:  # meanwhile, when there was no such worker yet
                self._worker.close()
            self._call_the_companion()

    # --- the companion, who comes first: the worker needs its address ---

    def _call_the_companion(self) -> None:
        self._misses_companion = False
        if self._companion is None:
            self._begin_work(self.spec)
            return
        self._story.be("starting", "a second volunteer comes up on this machine")
        self._show()
        self._companion.start()

    def _look_after_the_companion(self) -> None:
        companion = self._companion
        if companion is None or self._paused or self._leaving:
            return
        companion.drain()
        if companion.error and not self._misses_companion:
            self._misses_companion = True  # told once
            what = "has left" if companion.maddrs else "did not start"
            why = companion.error.rstrip(".")
            self._story.warn(f"The second volunteer of this machine {what}: {why}. Yours goes on alone.")
            companion.give_up()
        if not self._has_work and (companion.maddrs or companion.error):
            self._begin_work(self.spec.model_copy(update={"initial_peers": companion.maddrs}))

    def _begin_work(self, spec: WorkerSpec) -> None:
        self._story.be("starting", "preparing the model and the data")
        self._has_work = True
        self._worker.begin(spec)
        self._show()

    # --- limits, the picture, the end ---

    def _keep_the_caps(self) -> None:
        p = self._story.progress
        if self._leaving:
            return
        if time.monotonic() - self._began >= self._max_seconds:
            p.message = f"Your limit of {duration(self._max_seconds)} is reached."
        elif p.bytes_sent + p.bytes_received >= self._max_bytes:
            p.message = f"Your limit of {size(self._max_bytes)} is reached."
        elif self._finished_at is None or time.monotonic() - self._finished_at < SHARE_FOR:
            return
        self._begin_leave()

    def _show(self, now: bool = False) -> None:
        self._story.progress.updated = time.time()
        self.progress = copy.copy(self._story.progress)
        if now or time.monotonic() - self._status_at >= STATUS_EVERY:
            self._status_at = time.monotonic()
            with suppress(OSError):  # a full disk: those who look from elsewhere see the last one
                self.home.save_status(self.progress.as_dict())

    def _break(self, error: Exception) -> None:
        """What should not happen: say so, rather than goodbye."""
        with suppress(OSError), self.home.log.open("a") as log:
            traceback.print_exception(error, file=log)
        self._story.be("failed")
        self._story.progress.message = (
            f"The program that looks after the training broke ({type(error).__name__}: {error}), so the training was "
            "ended. What you gave stays counted.\n1. Join again.\n"
            f"2. If it happens again, show the host the end of the log: tail -n 50 {self.home.log}"
        )

    def _say_goodbye(self) -> None:
        if self._has_work:
            self._worker.leave()  # at once, unless it was we who broke
        if self._companion is not None:
            self._companion.leave()
        if self._story.progress.state not in ("finished", "failed"):
            self._story.be("left")

    def _close_workers(self) -> None:
        for one in (self._companion, self._worker):
            if one is not None:
                one.close()


def last_seen(home: Home) -> Progress | None:
    """What the stay of this or another process has saved of itself; None if that cannot be read."""
    status = home.status()
    try:
        return Progress.from_dict(status) if status else None
    except (ValueError, TypeError):  # of another version
        return None


def seen_elsewhere(home: Home) -> Progress:
    """The same, of a stay that another process of this machine controls."""
    return replace(last_seen(home) or Progress(state="training"), is_elsewhere=True)
