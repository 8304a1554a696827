"""How often one may ask: by address, account and key, with the moving windows of the `limits` package."""

from __future__ import annotations

import time

import limits

from volunteer_kit.auth.authority.settings import Pace
from volunteer_kit.auth.moderation import Refused


class Pacer:
    """Counts in memory; a restart begins anew."""

    def __init__(self, pace: Pace) -> None:
        self._items = {name: limits.parse(text) for name, text in vars(pace).items()}
        self._window = limits.strategies.MovingWindowRateLimiter(limits.storage.MemoryStorage())

    def take(self, rule: str, who: str) -> None:
        """One more. `rule`: a field of Pace. Raises Refused (limit)."""
        item = self._items[rule]
        if not self._window.hit(item, rule, who):
            self._refuse(rule, who)

    def require_some(self, rule: str, who: str) -> None:
        """Is there one left? Takes none. Raises Refused (limit)."""
        if not self._window.test(self._items[rule], rule, who):
            self._refuse(rule, who)

    def _refuse(self, rule: str, who: str) -> None:
        ends = self._window.get_window_stats(self._items[rule], rule, who).reset_time
        wait = max(1.0, ends - time.time())
        raise Refused("limit", f"Too many requests from here.\n1. Wait {wait:.0f} s, then try again.", wait)
