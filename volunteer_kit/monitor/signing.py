"""What this monitor signs: which states are good, and to which the run goes back. And what others have signed."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from hivemind.utils import get_dht_time

from volunteer_kit.auth.access_token import KeysError
from volunteer_kit.auth.keys import TokenError
from volunteer_kit.monitor.kept import Kept, KeptStates
from volunteer_kit.monitor.member import Member
from volunteer_kit.monitor.notes import Notes
from volunteer_kit.swarm.manifest import MANIFEST_EVERY, Manifest, Order

AGAIN = 10.0  # s until something that no node took is published again
AHEAD, AHEAD_SECONDS = 50, 3600.0  # epochs, and s of epochs, that the others can be ahead of us
HEARD_WITHIN = 20.0  # s in which every peer hears of an order; they make steps meanwhile


class Signing:
    """Of a run with an authority. To be called from the loop; each call is one or two looks into the DHT."""

    def __init__(self, member: Member, kept: KeptStates, notes: Notes):
        self._member, self._kept, self._notes = member, kept, notes
        self._statements = member.optimizer.statements
        self._newest: Manifest | None = None  # that anybody signed
        self._not_before = 0.0
        for one in kept.all:  # its own file may be damaged, and what we signed is below no later statement
            if one.signed is not None:
                self._statements.sequences.raise_to("manifest", one.signed.sequence)

    # --- manifests ---

    def look(self) -> None:
        """Which is the newest manifest? Ours of the same state count as signed."""
        found = self._statements.find("manifest")
        if found is not None and (self._newest is None or found.sequence >= self._newest.sequence):
            self._newest = found
            self._statements.sequences.raise_to("manifest", found.sequence)
            for one in self._kept.all:
                if one.root == found.root.hex() and one.signed != found:
                    self._kept.update(one, replace(one.with_manifest(found), confirmed=True))
        elif found is None and self._newest is None:
            signed = [one for one in self._kept.confirmed if one.manifest is not None]
            if signed:  # nobody was left who remembers it
                self._publish(signed[-1])

    def sign_what_is_due(self) -> None:
        """The newest confirmed state, ten epochs after the last one that anybody signed."""
        due = [one for one in self._kept.confirmed if one.root and one.manifest is None]
        if not due or time.monotonic() < self._not_before:
            return
        newest, last = due[-1], self._newest
        is_new_line = last is None or last.order != newest.order
        if is_new_line or newest.epoch >= last.epoch + MANIFEST_EVERY:
            self._publish(newest)

    def _publish(self, one: Kept) -> None:
        try:
            manifest = self._manifest(one)
            if self._is_out(manifest, "manifest"):
                self._newest = manifest
                self._kept.update(one, one.with_manifest(manifest))
                self._statements.sequences.raise_to("manifest", manifest.sequence)
                return
            self._notes.warn("No peer took what the monitor signed; it tries again.")
        except (KeysError, TokenError, OSError) as error:
            self._notes.warn(f"The state of step {one.epoch} could not be signed: {error}")
        self._not_before = time.monotonic() + AGAIN

    def _is_out(self, said: Manifest | Order, kind: str) -> bool:
        """Sign, and store. A store that nobody answered in time may have been done all the same."""
        return self._statements.publish(self._member.signer().sign, said) or self._statements.find(kind) == said

    def _manifest(self, one: Kept) -> Manifest:
        now = get_dht_time()
        return Manifest(
            run_key=self._member.run_key,
            epoch=one.epoch,
            sequence=self._statements.next_sequence("manifest"),
            order=one.order,
            lineage=bytes.fromhex(one.lineage),
            root=bytes.fromhex(one.root),
            total_bytes=one.total_bytes,
            chunk_size=one.chunk_size,
            created_at=now,
            expires_at=self._statements.expiry("manifest", now),
        )

    # --- orders ---

    def order(self, one: Kept, epochs_per_second: float) -> Order | None:
        """Tell everybody to go back to a state. :returns: the order, None if it could not be given (told).

        :param epochs_per_second: of the swarm; the new number must be above that of anybody who has not heard yet
        """
        optimizer, now = self._member.optimizer, get_dht_time()
        # one who claims to be far ahead must not move the number: epochs only go on, and the schedule ends with them
        most = optimizer.local_epoch + AHEAD + math.ceil(AHEAD_SECONDS * epochs_per_second)
        newest = max(optimizer.local_epoch, min(optimizer.tracker.global_epoch, most), one.epoch)
        try:
            order = Order(
                run_key=self._member.run_key,
                sequence=max(self._statements.next_sequence("rollback"), self._member.order + 1),
                resume_epoch=newest + 3 + math.ceil(HEARD_WITHIN * epochs_per_second),
                issued_at=now,
                expires_at=self._statements.expiry("rollback", now),
                manifest=one.signed or self._manifest(one),
            )
            if self._is_out(order, "rollback"):
                return order
            self._notes.warn("No peer took the order to go back; the monitor tries again.")
        except (KeysError, TokenError, OSError) as error:
            self._notes.warn(f"The order to go back to step {one.epoch} could not be signed: {error}")
        return None

    def last_order(self) -> Order | None:
        return self._statements.find("rollback")
