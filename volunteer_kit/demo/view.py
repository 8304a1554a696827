"""What the demo shows while it runs: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from volunteer_kit.demo.state import DemoState, Volunteer

NEWS_SHOWN = 6  # lines under the table
PLAIN_EVERY = 10.0  # s between two lines about the swarm as a whole


class View(Protocol):
    """Shows a DemoState. `note` is a line that stays; `update` is called often and decides itself."""

    def start(self) -> None: ...

    def note(self, text: str) -> None: ...

    def update(self, state: DemoState, phase: str, elapsed: float, budget: float) -> None: ...

    def stop(self) -> None: ...


def make_view(stdout: TextIO | None = None) -> View:
    """The table if stdout is a terminal, else lines; a notebook's stdout is none."""
    stdout = stdout or sys.stdout
    return LiveView() if stdout.isatty() else PlainView(stdout)


class PlainView:
    """News as they come and one line about the swarm now and then: for logs, pipes and notebooks."""

    def __init__(self, stdout: TextIO | None = None, every: float = PLAIN_EVERY) -> None:
        self._stdout = stdout or sys.stdout
        self._every = every
        self._told = 0
        self._last_line = float("-inf")  # monotonic s
        self._last_text = ""

    def start(self) -> None:
        pass

    def note(self, text: str) -> None:
        print(text, file=self._stdout, flush=True)

    def update(self, state: DemoState, phase: str, elapsed: float, budget: float) -> None:
        for line in state.news[self._told :]:
            self.note(f"  * {line}")
        self._told = len(state.news)
        now = time.monotonic()
        if now - self._last_line < self._every:
            return
        text = swarm_line(state, elapsed, budget) if state.losses else starting_line(state)
        if text != self._last_text:
            self.note(text)
            self._last_line, self._last_text = now, text

    def stop(self) -> None:
        pass


class LiveView:
    """The table, redrawn in place; the last state of it stays on the screen."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4, transient=False)

    def start(self) -> None:
        self._live.start()

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def update(self, state: DemoState, phase: str, elapsed: float, budget: float) -> None:
        self._live.update(table(state, phase, elapsed, budget))

    def stop(self) -> None:
        self._live.stop()


def clock(seconds: float) -> str:
    """83 -> "1:23"."""
    return f"{int(max(0, seconds)) // 60}:{int(max(0, seconds)) % 60:02d}"


def duration(seconds: float) -> str:
    """83 -> "83 s", 125 -> "2 min 5 s", 240 -> "4 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def counted(number: int, thing: str) -> str:
    """(1, "volunteer") -> "1 volunteer"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def starting_line(state: DemoState) -> str:
    """Before the first epoch: how far everybody is."""
    return "Starting: " + "; ".join(f"{v.name} {v.state}" for v in state.volunteers.values())


def swarm_line(state: DemoState, elapsed: float, budget: float) -> str:
    """The whole swarm in one line."""
    loss = state.curve[-1].loss if state.curve else None
    active = sum(v.training for v in state.volunteers.values())
    return (
        f"{clock(elapsed)} of {clock(budget)}  epoch {state.epoch}  loss {number(loss)}  "
        f"{state.samples_per_second:,.0f} samples/s  {state.samples:,} samples  {counted(active, 'volunteer')} at work"
    )


def table(state: DemoState, phase: str, elapsed: float, budget: float) -> Group:
    """Everything about the swarm that fits on a screen."""
    have, need = state.progress
    toward = f", {min(have, need)} of {need} samples of the next" if need and state.losses else ""
    title = Text(f"{clock(elapsed)} of {clock(budget)}   ", style="bold")
    title.append(f"epoch {state.epoch}{toward}" if state.losses else "the swarm is being set up", style="bold cyan")
    rows = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    rows.add_column("volunteer", no_wrap=True)
    rows.add_column("state", no_wrap=True, min_width=22)
    for name in ("samples/s", "epoch", "loss", "samples", "share"):
        rows.add_column(name, justify="right", no_wrap=True)
    rows.add_column("device", style="dim", overflow="ellipsis", no_wrap=True)
    for volunteer in state.volunteers.values():
        rows.add_row(*_row(state, volunteer))
    loss = state.curve[-1].loss if state.curve else None
    rows.add_row(
        "the swarm", phase, number(state.samples_per_second, 0), str(state.epoch), number(loss), f"{state.samples:,}",
        "", "", style="bold",
    )  # fmt: skip
    news = [Text(f"* {line}", overflow="fold") for line in state.news[-NEWS_SHOWN:]]
    return Group(title, Text(), rows, Text(), *news)


def _row(state: DemoState, v: Volunteer) -> tuple[Text | str, ...]:
    colour = "green" if v.training or v.state in ("finished", "left") else "yellow"
    if v.state.startswith(("killed", "crashed", "stopped", "given")):
        colour = "red"
    speed = number(v.samples_per_second, 1) if v.training and v.samples_per_second else "-"
    epoch = str(v.epoch) if v.source else "-"
    share = f"{state.share(v):.0%}" if v.samples else "-"
    return v.name, Text(v.state, style=colour), speed, epoch, number(v.loss), f"{v.samples:,}", share, v.device
