"""What a person can do something about."""

from __future__ import annotations


class DashboardError(OSError):
    """The dashboard cannot be served or written; the message says why and what to do."""
