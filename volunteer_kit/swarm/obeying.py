"""What the monitor has signed, and this peer's part in it: stand on the checkpoint before anything else, and go back to
an earlier state when it orders so.

All who obey an order hold the same afterwards, whenever they do: state, statistics, epoch and lineage come of the order
alone. While some have obeyed and others not yet, they are two swarms: they form no groups (agreement.under_order), take
no states of each other, and do not outvote each other. Who is behind hears of it within ORDERS_EVERY, or at once when a
donor's state turns out to be under a later order.
"""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Any

from hivemind.utils import MPFuture
from hivemind.utils.logging import get_logger

from volunteer_kit.swarm.acceptance import StateTrust
from volunteer_kit.swarm.agreement import LINEAGE_SIZE, Follow
from volunteer_kit.swarm.arrival import OnDownload
from volunteer_kit.swarm.manifest import Manifest, Order, Sequences, Statements
from volunteer_kit.swarm.options import SwarmOptions
from volunteer_kit.swarm.progress import SwarmProgressTracker
from volunteer_kit.swarm.state import SwarmStateAverager
from volunteer_kit.swarm.uncertain import UncertainSteps

logger = get_logger(__name__)
ORDERS_EVERY = 5.0  # s between looks for a new order; one DHT lookup, nobody waits for it
OBEY_AGAIN = 10.0  # s after which a state that could not be fetched is asked for again
LOST = 3  # times that donors' states were too far from ours, one after another, until it is ours that is doubted


def lineage_after(order: Order) -> bytes:
    """Of all who have obeyed it."""
    words = b"rollback %d" % order.sequence + order.root
    return hashlib.blake2b(words, digest_size=LINEAGE_SIZE).digest()


class ObeyingOptimizer:
    """The part of the optimizer that knows the monitor. Without trust_states() it does nothing."""

    options: SwarmOptions
    tracker: SwarmProgressTracker
    state_averager: SwarmStateAverager
    uncertain_steps: UncertainSteps
    _follow: Follow | None = None  # whose state to take before the next microbatch
    on_download: OnDownload | None = None  # told (bytes here, bytes in all) while we wait for a state
    statements: Statements | None = None
    _looking: MPFuture | None = None
    _next_order_lookup = 0.0  # time.monotonic()

    def trust_states(self, trust: StateTrust) -> None:
        """Believe no donor's word from now on. To be called before join()."""
        sequences = Sequences(trust.folder / "sequences.json")
        self.statements = Statements(self.dht, trust.run_key, trust.authority, sequences)
        self.state_averager.trust_only(trust)

    # --- before the first microbatch ---

    def stand_on_checkpoint(self, timeout: float | None = None) -> bool:
        """Take the newest state that the monitor signed, if it is newer than ours or under an order that ours is not.

        :param timeout: s; by default load_state_timeout
        :returns: whether one was taken. Before the first manifest we stand on the run's seed.
        """
        if self.statements is None:
            return False
        order, manifest = self.statements.find("rollback"), self._newest_manifest()
        if order is not None and order.sequence > self.state_averager.obeyed:
            if manifest is None or manifest.order < order.sequence:
                return self.obey(order, timeout)
        ours = (self.state_averager.obeyed, self.local_epoch)
        if manifest is None or (manifest.order, manifest.epoch) <= ours:
            return False
        return self._take_manifest(manifest, timeout)

    def stand_on_checkpoint_if_lost(self) -> bool:
        """Every donor's state is too far from ours: then it is ours that has gone astray, or nobody is to be believed.
        Either way the ground is what the monitor signed, though it is older."""
        if self.statements is None or self.state_averager.refused_for_distance < LOST:
            return False
        self.state_averager.refused_for_distance = 0
        manifest = self._newest_manifest()
        if manifest is None:
            self.state_averager.stand_on_seed()
            return False  # what comes next is compared with it
        return self._take_manifest(manifest)

    def _newest_manifest(self) -> Manifest | None:
        manifest = self.statements.find("manifest")
        if manifest is not None:
            self.statements.sequences.raise_to("manifest", manifest.sequence)
        return manifest

    def _take_manifest(self, manifest: Manifest, timeout: float | None = None) -> bool:
        taken = self._adopt_signed(manifest, timeout)
        if taken:
            self.statements.sequences.raise_to("rollback", manifest.order)
        else:
            logger.warning(f"The state of epoch {manifest.epoch} that the monitor signed could not be fetched")
        return taken

    # --- orders ---

    def obey_orders(self) -> bool:
        """To be called between microbatches: is there an order that we have not obeyed? Waits for nobody but, if there
        is one, for its state. :returns: whether we have gone back; gradients at hand are then of no use."""
        if self.statements is None:
            return False
        if self.state_averager.later_order:
            self.state_averager.later_order, self._next_order_lookup = False, 0.0
        if self._looking is None:
            if time.monotonic() >= self._next_order_lookup:
                self._looking = self.statements.look("rollback")
                self._next_order_lookup = time.monotonic() + ORDERS_EVERY
            return False
        if not self._looking.done():
            return False
        found, self._looking = self._looking, None
        order = None if found.cancelled() or found.exception() else self.statements.read("rollback", found.result())
        return order is not None and self.obey(order)

    def obey(self, order: Order, timeout: float | None = None) -> bool:
        """Go back to the state of an order, and on from it as epoch `resume_epoch`. Our gradients are dropped, and our
        steps since are given up. :returns: whether we have; False too if we had before.

        :param timeout: s to fetch the state, if it is not on our disk; by default load_state_timeout
        """
        if order.sequence <= self.state_averager.obeyed:
            return False
        instead = {
            "epoch": order.resume_epoch,
            "lineage": lineage_after(order).hex(),
            "order": order.sequence,
        }
        if not self._adopt_signed(order.manifest, timeout, **instead):
            logger.warning(f"The monitor's order to go back to epoch {order.to_epoch} cannot be obeyed yet")
            self._next_order_lookup = time.monotonic() + OBEY_AGAIN
            return False
        self.statements.sequences.raise_to("rollback", order.sequence)
        logger.info(f"Back at the state of epoch {order.to_epoch}, now called {order.resume_epoch}, by the monitor")
        return True

    def _adopt_signed(self, manifest: Manifest, timeout: float | None, **instead: Any) -> bool:
        averager, patience = self.state_averager, self.load_state_timeout if timeout is None else timeout
        averager.abandon_statistics()  # or a step that waits for them would be waited for
        leave = threading.Timer(self.matchmaking_time, self._drop_scheduled_round)
        leave.start()  # a state on the disk is quicker, and whoever leaves a group makes the others wait
        try:
            store = averager.fetch(manifest, patience, self.on_download)
            if store is None:
                return False
            self._drop_scheduled_round()
            self._finish_updates()
            with self.tracker.pause_updates():
                if not averager.take_checkpoint(manifest, store, **instead):
                    return False
                self._follow = None
                self.uncertain_steps.given_up(averager.kept_until)
                self._start_epoch_anew()
        finally:
            leave.cancel()
        return True
