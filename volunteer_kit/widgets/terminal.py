"""A terminal: one block that is redrawn in place by rich; keys p, r and q for pause, resume and leave."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from textwrap import indent
from typing import Any

from volunteer_kit.widgets import words
from volunteer_kit.widgets.progress import Progress
from volunteer_kit.widgets.prompt import agree, terms_lines
from volunteer_kit.widgets.surface import DRAW_EVERY, LoginChoice, Wish, can_answer
from volunteer_kit.widgets.terms import Terms

COLOURS: dict[words.Tone, str] = {"good": "green", "busy": "yellow", "still": "bright_black", "bad": "red"}
KEYS: dict[str, Wish] = {"p": "pause", "r": "resume", "q": "leave"}
BARS = "▁▂▃▄▅▆▇█"


class TerminalSurface:
    """Needs rich and a terminal."""

    def __init__(self, *, accept_terms: bool = False, console: Any | None = None) -> None:
        """`console`: a rich Console to draw on (None: standard output)."""
        from rich.console import Console
        from rich.live import Live

        self._console = console or Console(highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stderr=False)
        self._accept_terms = accept_terms
        self._drawn_at = float("-inf")
        self._keys: _Keys | None = None
        self._is_closed = False

    def welcome(self, terms: Terms, login: LoginChoice | None) -> None:
        for line in terms_lines(terms):
            self._console.print(line)
        agree(terms, login, accept_terms=self._accept_terms, can_answer=can_answer(None), say=self.say)

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if self._is_closed or now - self._drawn_at < DRAW_EVERY:
            return
        self._drawn_at = now
        if not self._live.is_started:
            self._live.start()
        self._live.update(picture(progress, keys=self._keys is not None), refresh=True)

    def pump(self, seconds: float = 0.0) -> list[Wish]:
        if self._keys is None and can_answer(None) and not self._is_closed:
            self._keys = _Keys.open()
        if self._keys is None:
            time.sleep(seconds)
            return []
        return [KEYS[key] for key in self._keys.pressed(seconds) if key in KEYS]

    def say(self, line: str) -> None:
        self._console.print(words.plain_lines(line))

    def close(self, progress: Progress | None = None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._keys is not None:
            self._keys.close()
        if self._live.is_started:
            self._live.stop()
        if progress is not None:
            self._console.print(picture(progress))


def picture(progress: Progress, *, keys: bool = False) -> Any:
    """The block as a rich renderable. Only plain Text: nothing from outside is read as markup."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    colour = COLOURS[words.tone(progress)]
    label, share = words.bar(progress)
    facts = Table.grid(padding=(0, 3))
    for first, second in _pairs(words.facts(progress)):
        facts.add_row(*(Text(cell) for fact in (first, second) for cell in _cells(fact)))
    curve = sparkline([loss for _, loss in words.points(progress)])
    rows = [
        Text.assemble(("● ", colour), (words.headline(progress), "bold")),
        Text(indent(words.meaning(progress), "  "), style="dim"),
        Text(label),
        ProgressBar(total=1.0, completed=share or 0.0, width=60, pulse=share is None),
        facts,
        Text.assemble((curve + "  " if curve else "", "blue"), words.loss_line(progress)),
        *(Text(f"! {line}", style="yellow") for line in words.warnings(progress)[:3]),
        Text(words.plan(progress), style="dim"),
        Text(words.stay(progress) + (f"   {_keys(progress)}" if keys else ""), style="dim"),
    ]
    return Group(*rows)


def sparkline(values: list[float], width: int = 40) -> str:
    """The curve in one line of blocks; each is the mean of its part."""
    if len(values) < 2:
        return ""
    parts = min(width, len(values))
    cuts = [round(index * len(values) / parts) for index in range(parts + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def _keys(progress: Progress) -> str:
    return "[q]uit looking" if progress.is_elsewhere else "[p]ause  [r]esume  [q]uit"


def _pairs(facts: list[words.Fact]) -> list[tuple[words.Fact, words.Fact]]:
    return list(zip(facts[::2], facts[1::2], strict=True))


def _cells(fact: words.Fact) -> tuple[str, str]:
    return fact.label, f"{fact.value}  {fact.note}".strip()


class _Keys:
    """Single keys without Enter; the terminal is put back however we end."""

    def __init__(self, descriptor: int, before: list[Any]) -> None:
        self._descriptor, self._before = descriptor, before

    @classmethod
    def open(cls) -> _Keys | None:
        import atexit

        try:
            import termios
            import tty

            descriptor = sys.stdin.fileno()
            if not _is_ours(descriptor):
                return None
            before = termios.tcgetattr(descriptor)
            tty.setcbreak(descriptor)
        except (ImportError, OSError, ValueError, termios.error):
            return None
        keys = cls(descriptor, before)
        atexit.register(keys.close)
        return keys

    def pressed(self, seconds: float) -> list[str]:
        self._take_hold()
        if not _is_ours(self._descriptor):
            time.sleep(seconds)
            return []
        until = time.monotonic() + seconds
        found: list[str] = []
        while True:
            left = max(0.0, until - time.monotonic())
            ready, _, _ = select.select([self._descriptor], [], [], left)
            data = b""
            with contextlib.suppress(OSError):  # the terminal is gone
                data = os.read(self._descriptor, 64) if ready else b""
            found += data.decode(errors="ignore").lower()
            if not data:  # also at the end of input, which is always ready
                time.sleep(max(0.0, until - time.monotonic()))
                return found

    def _take_hold(self) -> None:
        """Anew after Ctrl-Z: the shell has put the terminal back meanwhile."""
        import termios
        import tty

        with contextlib.suppress(termios.error, OSError):
            if _is_ours(self._descriptor) and termios.tcgetattr(self._descriptor)[3] & termios.ICANON:
                tty.setcbreak(self._descriptor)

    def close(self) -> None:
        import termios

        if not _is_ours(self._descriptor):
            return
        with contextlib.suppress(termios.error, OSError):
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)


def _is_ours(descriptor: int) -> bool:
    """Whether this process is in the terminal's foreground: one in the background is stopped when it touches it."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # it is not the one that controls this process
        return True
