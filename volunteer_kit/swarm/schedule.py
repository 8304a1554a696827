"""The learning rate of the epoch that we are at, also after we have gone back.

hivemind steps the schedule on to a later epoch, and never back. Whoever gave up a step of its own then made up for the
others' at the next one's rate: by the same averages it came to another model, while warming up to one that all could
see, later to one that nobody saw.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple


class Beginning(NamedTuple):
    scheduler: Any
    state: dict
    groups: list[dict]  # of the optimizer: all but the parameters


class Scheduled:
    """Part of SwarmStateAverager."""

    _beginning: Beginning | None = None

    def _update_scheduler(self) -> None:
        """A schedule that is farther than our epoch begins anew, as far back as we have seen it."""
        scheduler, groups = self.scheduler, self.optimizer.param_groups
        if scheduler is not None:
            if self._beginning is None or self._beginning.scheduler is not scheduler:
                kept = [{name: deepcopy(value) for name, value in g.items() if name != "params"} for g in groups]
                self._beginning = Beginning(scheduler, deepcopy(scheduler.state_dict()), kept)
            if scheduler._step_count > self.local_epoch + 1:
                scheduler.load_state_dict(deepcopy(self._beginning.state))
                for group, kept in zip(groups, self._beginning.groups, strict=True):
                    group.update(deepcopy(kept))
        super()._update_scheduler()
