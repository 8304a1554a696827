"""Sign which states are good, and the rollback orders that this monitor's node sends. Follow what others have
signed."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from hivemind.utils import get_dht_time

from volunteer_kit.auth.access_token import KeysError
from volunteer_kit.auth.keys import TokenError
from volunteer_kit.checkpoint import CheckpointError, load_checkpoint
from volunteer_kit.monitor.kept import Kept, KeptStates
from volunteer_kit.monitor.notes import Notes
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.node.member import SEQUENCE_BITS
from volunteer_kit.swarm.state.manifest import MANIFEST_EVERY, Manifest, Statements

if TYPE_CHECKING:
    from volunteer_kit.monitor.member import Member

AGAIN = 10.0  # s until something that no node took is published again
FOLLOWED_WITHIN: Final = 30.0  # s; others hear of an order as soon as this monitor's own node


class LastOrder(NamedTuple):
    """An order that is in the state."""

    number: int
    parent: bytes  # lineage of the checkpoint


class GivenOrder(NamedTuple):
    """An order that this monitor's node follows."""

    sequence: int  # its number
    to_epoch: int
    resume_epoch: int
    root: bytes  # what a state is known by: its lineage


class Signing:
    """Sign in a run with an authority. Call it from the loop; each call looks into the DHT once or twice.

    :param followed_within: s, for this monitor's own node to follow an order
    """

    def __init__(
        self,
        member: Member,
        statements: Statements,
        kept: KeptStates,
        notes: Notes,
        followed_within: float = FOLLOWED_WITHIN,
    ):
        self._member, self._statements, self._kept, self._notes = member, statements, kept, notes
        self._followed_within = followed_within
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
            # a store that nobody answered in time may have been done all the same
            is_out = self._statements.publish(self._member.own.signer().sign, manifest)
            if is_out or self._statements.find("manifest") == manifest:
                self._newest = manifest
                self._kept.update(one, one.with_manifest(manifest))
                self._statements.sequences.raise_to("manifest", manifest.sequence)
                return
            self._notes.warn("No peer took what the monitor signed; it tries again.")
        except (KeysError, TokenError, OSError) as error:
            self._notes.warn(f"The state of step {one.epoch} could not be signed: {error}")
        self._not_before = time.monotonic() + AGAIN

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

    def order(self, one: Kept) -> GivenOrder | None:
        """Order everybody back to a state. :returns: the order, None if it could not be given (told)."""
        member = self._member
        try:
            found = load_checkpoint(self._kept.checkpoints / one.checkpoint, fingerprint=member.run.fingerprint)
            sign = partial(member.own.signer().sign, "order")
            order = member.order_back(found.tensors, found.meta, sign)
        except (KeysError, CheckpointError, OSError, KeyError, SwarmError) as error:
            self._notes.warn(f"The order to go back to step {one.epoch} could not be given: {error}")
            return None
        if order is None or not self._is_followed(order.parent, order.generation):
            self._notes.warn("This monitor's node did not give the order to go back; the monitor tries again.")
            return None
        return GivenOrder(member.order, one.epoch, order.epoch, order.parent)

    def _is_followed(self, parent: bytes, generation: int) -> bool:
        deadline = time.monotonic() + self._followed_within
        while time.monotonic() < deadline:
            last = self._member.last_order
            if last is not None and last.parent == parent and last.number >> SEQUENCE_BITS == generation:
                return True
            time.sleep(0.05)
        return False

    def last_order(self) -> GivenOrder | None:
        """The order that is in the state, this monitor's or another one's; None where its checkpoint's step is not
        known any more."""
        last = self._member.last_order
        if last is None:
            return None
        kept = [one.epoch for one in self._kept.all if one.lineage == last.parent.hex()]
        to_epoch = kept[0] if kept else self._member.epoch_of(last.parent)
        if to_epoch is None:
            return None
        return GivenOrder(last.number, to_epoch, self._member.epoch, last.parent)
