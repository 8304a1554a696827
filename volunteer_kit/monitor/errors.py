"""The monitor's one exception."""


class MonitorError(OSError):
    """The monitor cannot do what it is asked: what happened, and what to do about it."""
