"""What somebody who wants credit for nothing does, in his own process; each by the best way that we know."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hivemind.p2p import PeerID

from volunteer_kit.swarm import receipts
from volunteer_kit.swarm.grad_averager import SwarmGradientAverager
from volunteer_kit.swarm.receipts import ReceiptWriter


class Honest:
    """Also what the others build on."""

    def __init__(self, settings: Mapping):
        self.settings = settings
        self.much = 1.9 * settings["target_batch_size"]  # twice a target batch is refused as a lie

    def begin(self, writer: ReceiptWriter, accounts: Mapping[PeerID, bytes]) -> None:
        pass

    def about(self) -> dict:
        """What its signed record says otherwise."""
        return {}


def _send(weight: float | None = None, change=None) -> None:
    """Average with another weight, or other values."""
    load, step = SwarmGradientAverager.load_accumulators_into_averager_, SwarmGradientAverager.step

    @torch.no_grad()
    def load_and_change(self) -> None:
        load(self)
        if change is not None:
            with self.get_tensors() as tensors:
                for tensor in tensors:
                    change(tensor)

    def step_with_weight(self, weight_of_truth=None, **kwargs):
        return step(self, weight=weight if weight is not None else weight_of_truth, **kwargs)

    SwarmGradientAverager.load_accumulators_into_averager_ = load_and_change
    SwarmGradientAverager.step = step_with_weight


class Inflated(Honest):
    """Declares nearly two target batches, of a device that nobody else has, as fast as the run allows."""

    def begin(self, writer, accounts) -> None:
        _send(weight=self.much)

    def about(self) -> dict:
        return {"device": "an engine", "samples_per_second": 9_999.0}


class InflatedAlike(Inflated):
    """The same, of the device that all have, at a speed that is not believed."""

    def about(self) -> dict:
        return {"samples_per_second": 9_999.0}


class Idle(Honest):
    """Sends zeros, with the weight of a fair share."""

    def begin(self, writer, accounts) -> None:
        _send(weight=self.settings["fair"], change=torch.Tensor.zero_)


class Inventive(Honest):
    """Sends noise as large as a gradient: nobody can tell, as credit.py says."""

    def begin(self, writer, accounts) -> None:
        _send(weight=self.settings["fair"], change=lambda tensor: tensor.uniform_(0.0, 2e-4))


class Generous(Honest):
    """Signs more than anybody sent: for itself, or for friends by account, and for one who is not there."""

    def begin(self, writer, accounts) -> None:
        friends = {peer for peer, account in accounts.items() if account.decode() in self.settings["friends"]}
        make = receipts.make_receipt

        def make_generously(own_id, reduced, weights, now):
            return make(own_id, reduced, {**weights, **{friend: self.much for friend in friends}}, now)

        receipts.make_receipt = make_generously


ATTACKS = {
    "none": Honest,
    "inflated": Inflated,
    "inflated_alike": InflatedAlike,
    "idle": Idle,
    "inventive": Inventive,
    "generous": Generous,
}
