"""One volunteer's stay in a run: a worker under supervision, and the picture of it. It goes on while nobody looks."""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections.abc import Callable

from volunteer_kit.companion import Companion
from volunteer_kit.home import Home
from volunteer_kit.story import Story
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.training.protocol import WorkerSpec
from volunteer_kit.widgets.progress import Progress

SHOW_EVERY = 0.25  # s between two pictures
STATUS_EVERY = 1.0  # s between two writings of the status file
SHARE_FOR = 60.0  # s after the run's end in which others may still take the state
PAUSED_BY_YOU = "press Resume to go on; nothing is lost"


class Stay:
    """The worker of one volunteer, from the first look at the run to the goodbye.

    A thread takes in what the worker tells, keeps the caps, and makes `progress`, a picture that is replaced as a
    whole and never changed; who shows it may come and go. All methods may be called from the main thread, where
    KeyboardInterrupt may strike at any line: it takes no locks of Python's own.

    :param progress: what is known before the worker has said anything
    :param max_hours: leave after so long
    :param max_gb: leave when so much was sent and received, 1e9 bytes
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
        self._story = Story(progress)
        self._max_seconds = 3600 * max_hours if max_hours else None
        self._max_bytes = 1e9 * max_gb if max_gb else None
        self._make_worker = make_worker
        self._worker = make_worker(None, log_path=home.log)
        self._companion: Companion | None = None
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._leaving = self._paused = self._wants_back = False
        self._status_at = float("-inf")
        self._finished_at: float | None = None
        self._began = time.monotonic()
        self._spec: WorkerSpec | None = None
        self._over = threading.Lock()  # held until all is over; a lock of C's, which an interrupt cannot harm
        self._over.acquire()
        self._thread: threading.Thread | None = None

    # --- what it can be told ---

    def warm_up(self) -> None:
        """Let the worker load its libraries, which takes seconds, while the volunteer reads."""
        self._worker.start()

    def begin(self, spec: WorkerSpec, companion: Companion | None = None) -> None:
        """Train. With a companion, as soon as that is up."""
        self._spec, self._companion, self._began = spec, companion, time.monotonic()
        self._story.progress.started = time.time()
        self._thread = threading.Thread(target=self._run, name="stay", daemon=True)
        self._thread.start()

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
        self._leaving = True
        self._orders.put("leave")
        for supervisor in self._supervisors():
            supervisor.close()
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
        try:
            self._begin_worker()
            while True:
                event = self._worker.next_event(timeout=SHOW_EVERY)
                while event is not None:
                    self._take(event)
                    event = self._worker.next_event(timeout=0)
                self._obey()
                self._come_back()
                self._keep_the_caps()
                self._look_after_the_companion()
                self._show()
                if not self._worker.running and not self._paused:
                    break
                if not self._worker.running:
                    time.sleep(SHOW_EVERY)
        finally:
            self._end()

    def _begin_worker(self) -> None:
        spec = self._spec
        if self._companion is not None:
            self._story.be("starting", "a second volunteer comes up on this machine")
            self._show()
            self._companion.start()
            spec = spec.model_copy(update={"initial_peers": self._companion.address()})
            if not spec.initial_peers:
                self._story.warn(f"The second volunteer did not start: {self._companion.error}")
            self._spec = spec
        self._story.be("starting", "preparing the model and the data")
        self._worker.begin(spec)
        self._show()

    def _take(self, event: dict) -> None:
        self._story.take(event)
        if event["event"] == "finished" and self._finished_at is None:
            self._finished_at = time.monotonic()
        if self._leaving and self._story.progress.state not in ("failed", "finished"):
            self._story.be("leaving", "the last work is being handed over")

    def _obey(self) -> None:
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return
            if order == "leave":
                self._begin_leave()
            elif order == "pause" and not self._paused and not self._leaving:
                self._paused = True
                self._worker.begin_leave()
                self._story.be("paused", PAUSED_BY_YOU)
            elif order == "resume":
                self._wants_back = self._paused

    def _come_back(self) -> None:
        """From a pause, once the worker of before has said goodbye."""
        if self._wants_back and self._paused and not self._worker.running:
            self._paused = self._wants_back = False
            self._worker = self._make_worker(self._spec, log_path=self.home.log)
            self._worker.start()
            self._story.be("starting", "back from the pause")

    def _begin_leave(self) -> None:
        if not self._leaving:
            self._leaving = True
            if self._story.progress.state not in ("finished", "failed"):
                self._story.be("leaving", "the last work is being handed over")
        self._paused = False
        self._worker.begin_leave()

    def _keep_the_caps(self) -> None:
        p = self._story.progress
        if self._paused and p.state != "failed":
            self._story.be("paused", PAUSED_BY_YOU)
        if self._leaving:
            return
        reached = ""
        if self._max_seconds and time.monotonic() - self._began >= self._max_seconds:
            reached = f"Your limit of {self._max_seconds / 3600:g} hours is reached."
        elif self._max_bytes and p.bytes_sent + p.bytes_received >= self._max_bytes:
            reached = f"Your limit of {self._max_bytes / 1e9:g} GB is reached."
        elif self._finished_at is not None and time.monotonic() - self._finished_at >= SHARE_FOR:
            reached = "The run is finished."
        if reached:
            p.message = reached
            self._begin_leave()

    def _look_after_the_companion(self) -> None:
        if self._companion is not None:
            self._companion.drain()
            if self._companion.error and not self._leaving:
                self._story.warn(self._companion.error)

    def _show(self) -> None:
        self._story.progress.updated = time.time()
        self.progress = copy.copy(self._story.progress)
        now = time.monotonic()
        if now - self._status_at >= STATUS_EVERY:
            self._status_at = now
            self._save_status()

    def _save_status(self) -> None:
        try:
            self.home.save_status(self.progress.as_dict())
        except OSError:  # a full disk: those who look from elsewhere see the last one
            pass

    def _end(self) -> None:
        if self._companion is not None:
            self._companion.supervisor.begin_leave()
            self._companion.supervisor.leave()
        if self._story.progress.state not in ("finished", "failed"):
            self._story.be("left")
        for supervisor in self._supervisors():
            supervisor.close()
        self._status_at = float("-inf")
        self._show()
        self.home.unlock()
        self._over.release()

    def _supervisors(self) -> list[Supervisor]:
        return [self._worker, *([self._companion.supervisor] if self._companion else [])]
