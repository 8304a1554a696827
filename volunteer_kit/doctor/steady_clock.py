"""Whether this machine's clock goes on steadily while the others are looked at: a jump, or a sleep."""

from __future__ import annotations

from collections.abc import Callable

from volunteer_kit.doctor.finding import Finding


def steady_clock() -> Callable[[], Finding]:
    """Begin to watch; :returns: what gives the finding, later."""
    from volunteer_kit.swarm.net.clock_watch import SET_CLOCK, ClockWatch

    watch = ClockWatch()

    def finding() -> Finding:
        return verdict(watch.look(), watch.woke, SET_CLOCK)

    return finding


def verdict(jumped: str | None, woke: str | None, way_out: str) -> Finding:
    """:param jumped, woke: in words, as ClockWatch has them; None: nothing of that kind"""
    if jumped:
        text = jumped.removesuffix(f": {way_out}")
        return Finding("clock steady", "problem", text, f"{way_out}   (and let no other program set the clock)")
    if woke:
        way_out = "Keep it awake while it trains: systemd-inhibit volunteer-kit join RUN"
        return Finding("clock steady", "warning", woke, way_out)
    return Finding("clock steady", "ok", "no jump and no sleep during this checkup")
