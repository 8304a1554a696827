"""A state on its way to us, as the training process sees it: begin with the parameters, step with the statistics.

Gradients need parameters only, so a joiner computes as soon as it has them, and a third of the download goes on beside
it. The first step waits for the statistics; until they are here nobody is given our state, for it is of two moments.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError  # not the built-in one on Python 3.10
from dataclasses import dataclass, field
from typing import Any

import torch
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture
from hivemind.utils.logging import get_logger

from volunteer_kit.swarm.stored_state import StoredState
from volunteer_kit.swarm.transfer import StateRefused

logger = get_logger(__name__)
LOOK_EVERY = 0.2  # s between looks at how far a download is
STATISTICS_PATIENCE = 900.0  # s that a step waits; a donor that falls silent is noticed much sooner

OnDownload = Callable[[int, int], None]  # bytes here, bytes in all


@dataclass
class Arrival:
    """Statistics of a state whose parameters are here. `failed`: why they will not come."""

    donor: bytes
    metadata: dict
    statistics: MPFuture
    failed: str | None = None
    settled: threading.Event = field(default_factory=threading.Event)


class ArrivingState(StoredState):
    """Downloads states. What fits, and how it is adopted, is the subclass's to say (check_..., adopt_...)."""

    last_donor: str | None = None

    def __init__(self, *args, **kwargs):
        self._arrival: Arrival | None = None
        self._arrival_lock = threading.RLock()
        self._broke_off: set[bytes] = set()  # donors that gave parameters and then no statistics
        super().__init__(*args, **kwargs)

    @property
    def complete(self) -> bool:
        """Parameters and statistics are of one moment."""
        return self._arrival is None

    @property
    def why_incomplete(self) -> str | None:
        """Why the statistics will not come; None if they are here, or on their way."""
        arrival = self._arrival
        return None if arrival is None else arrival.failed

    def load_state_from_peers(
        self,
        timeout: float | None = None,
        at_least: int | None = None,
        donors: Sequence[PeerID] | None = None,
        whole: bool = True,
        on_download: OnDownload | None = None,
        **_,
    ) -> bool:
        """Download a state that fits. :returns: whether one was adopted; if not, nothing has changed.

        :param timeout: s, for all donors together
        :param at_least: the epoch that it must have; by default ours
        :param donors: ask these; by default all that declare themselves, best first
        :param whole: wait for the statistics too; otherwise they come in the background, see `complete`
        :param on_download: told the bytes of what is waited for, several times a second
        """
        self.abandon_statistics()
        at_least = self.local_epoch if at_least is None else at_least
        refused = [*self._broke_off, *self.not_believed()]
        asked = None if donors is None else [donor.to_bytes() for donor in donors]
        deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
        sizes = self.state_sizes()
        progress = Progress(self._arrived, sum(sizes if whole else sizes[: self.num_parameters]), on_download)
        self._broke_off.clear()  # they are asked again when nobody else gives anything
        while time.monotonic() < deadline:
            parameters, statistics = MPFuture(), MPFuture()
            order = {"parameters": parameters, "statistics": statistics, "refused": refused, "donors": asked}
            self._outer_pipe.send(("_download_state", [], order))
            found = await_result(parameters, deadline, progress)
            if found is None:
                statistics.cancel()
                return False
            donor, metadata, tensors = found
            try:
                self._check_parameters(metadata, tensors, at_least)
                self.judge(donor, metadata, tensors)
                if whole:
                    self._adopt_whole(metadata, tensors, await_result(statistics, deadline, progress))
                else:
                    self._begin_with(metadata, tensors, Arrival(donor, metadata, statistics))
            except StateRefused as e:
                logger.info(f"State of {PeerID(donor)} refused: {e}")
                statistics.cancel()
                refused.append(donor)
                continue
            self.last_donor = str(PeerID(donor))
            return True
        return False

    def _check_parameters(self, metadata: Any, tensors: Sequence[torch.Tensor], at_least: int) -> None:
        self.check_metadata(metadata)
        self.check_tensors(tensors)
        if metadata["epoch"] < at_least:
            raise StateRefused(f"epoch {metadata['epoch']}, and {at_least} is needed")

    def _adopt_whole(self, metadata: Any, parameters: Sequence, statistics: Sequence | None) -> None:
        if statistics is None:
            raise StateRefused("its statistics did not come")
        self.check_state(metadata, [*parameters, *statistics])
        self.adopt_state(metadata, [*parameters, *statistics])

    def _begin_with(self, metadata: Any, parameters: Sequence[torch.Tensor], arrival: Arrival) -> None:
        self.keep_ground()
        with self._arrival_lock:
            self._arrival = arrival
            if self.allow_state_sharing:
                self.allow_state_sharing = False
            self.adopt_parameters(metadata, parameters)
        threading.Thread(target=self._receive_statistics, args=(arrival,), daemon=True).start()

    def _receive_statistics(self, arrival: Arrival) -> None:
        try:
            statistics = arrival.statistics.result()
            if statistics is None:
                raise StateRefused("they did not arrive")
            self.check_tensors(statistics, first=self.num_parameters)
            with self._arrival_lock:
                if self._arrival is arrival and arrival.failed is None:
                    self.adopt_statistics(arrival.metadata, statistics)
                    self.settle_arrival()
        except CancelledError:
            arrival.failed = arrival.failed or "given up"
        except Exception as e:  # whatever it is, the step must not wait for ever
            arrival.failed = arrival.failed or f"The optimizer's statistics of {PeerID(arrival.donor)}: {e}"
            logger.warning(arrival.failed)
            self._broke_off.add(arrival.donor)
        finally:
            arrival.settled.set()

    def await_statistics(self, timeout: float = STATISTICS_PATIENCE) -> None:
        """Wait for statistics that are on their way. Raises StateRefused if they do not come."""
        arrival = self._arrival
        if arrival is not None and not (arrival.settled.wait(timeout) and self.complete):
            raise StateRefused(arrival.failed or "the optimizer's statistics take too long")

    def abandon_statistics(self) -> None:
        """Let go of statistics that are on their way; a step that waits for them is not taken."""
        with self._arrival_lock:
            arrival = self._arrival
            if arrival is not None and arrival.failed is None:
                arrival.failed = "given up for a newer state"
                arrival.statistics.cancel()
                arrival.settled.set()

    def settle_arrival(self) -> None:
        """What we hold is of one moment, and others may have it."""
        self.ground_is_own()
        with self._arrival_lock:
            self._arrival = None
            if not self.client_mode:
                self.allow_state_sharing = True


class Progress:
    """Tells how far a download is, when it has moved.

    :param arrived: shared counter of bytes
    :param total: bytes
    """

    def __init__(self, arrived, total: int, tell: OnDownload | None):
        self._arrived, self._total, self._tell, self._last = arrived, total, tell, -1
        arrived.value = 0

    def look(self) -> None:
        done = min(self._arrived.value, self._total)
        if self._tell is not None and done != self._last:
            self._last = done
            self._tell(done, self._total)


def await_result(future: MPFuture, deadline: float, progress: Progress) -> Any:
    """The future's result; None, and the future cancelled, if there is none by the deadline (monotonic s)."""
    while True:
        progress.look()
        try:
            result = future.result(timeout=max(0.0, min(LOOK_EVERY, deadline - time.monotonic())))
        except FutureTimeoutError:
            if time.monotonic() >= deadline:
                future.cancel()
                return None
        else:
            progress.look()
            return result
