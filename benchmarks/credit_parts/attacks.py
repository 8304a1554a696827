"""Define the attacks of somebody who wants credit for nothing, in his own processes; each by the best way we know."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch


class Honest:
    """Does not cheat, and is the base of all attacks.

    :ivar times: samples that it claims for each one that it computed
    """

    times = 1.0
    works = True  # whether its gradients are of its samples

    def __init__(self, settings: Mapping):
        self.settings = settings
        self.much = int(1.9 * settings["target_batch_size"])

    def begin(self) -> None:
        """Prepare the attack before the node starts."""

    def change(self, gradient: torch.Tensor) -> None:
        """Change the gradient in place before the machine delivers it."""

    def about(self) -> dict:
        """Return the fields of its signed record that it falsifies."""
        return {}


class Inflated(Honest):
    """Claims eight samples for one, of a device that nobody else has, as fast as the run allows."""

    times = 8.0

    def about(self) -> dict:
        return {"device": "an engine", "samples_per_second": 9_999.0}


class InflatedAlike(Inflated):
    """The same, of the device that all have, at a speed that is not believed."""

    def about(self) -> dict:
        return {"samples_per_second": 9_999.0}


class Idle(Honest):
    """Delivers zeros, with the samples of a fair share."""

    works = False

    def change(self, gradient: torch.Tensor) -> None:
        gradient.zero_()


class Inventive(Idle):
    """Delivers noise as large as a gradient: nobody can tell without verification."""

    def change(self, gradient: torch.Tensor) -> None:
        gradient.uniform_(0.0, 2e-4)


class Generous(Honest):
    """Names shares of friends in the slices that it reduces: of itself, of accomplices, of one who is not there."""

    def begin(self) -> None:
        of = {account: peer for peer, account in reversed(self.settings["accounts"].items())}  # the first of each
        friends = [of[account] for account in self.settings["friends"]]
        os.environ["VOLUNTEER_KIT_GENEROUS"] = json.dumps({"friends": friends, "samples": self.much})
        first = str(Path(__file__).with_name("generous"))
        os.environ["PYTHONPATH"] = os.pathsep.join([first, os.environ.get("PYTHONPATH", "")])


ATTACKS = {
    "none": Honest,
    "inflated": Inflated,
    "inflated_alike": InflatedAlike,
    "idle": Idle,
    "inventive": Inventive,
    "generous": Generous,
}
