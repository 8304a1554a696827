"""Lines, for pipes and logs: a new one when the state changes, and now and then while it does not."""

from __future__ import annotations

import time
from collections.abc import Callable

from volunteer_kit import output
from volunteer_kit.widgets import words
from volunteer_kit.widgets.progress import Progress, State
from volunteer_kit.widgets.prompt import agree, terms_lines
from volunteer_kit.widgets.surface import LoginChoice, Wish, can_answer
from volunteer_kit.widgets.terms import Terms

LINE_EVERY = 30.0  # s while nothing but numbers changes


class TextSurface:
    """No buttons; Ctrl-C leaves."""

    def __init__(self, *, accept_terms: bool = False, write: Callable[[str], None] | None = None) -> None:
        """`write` gets each line (None: standard output, at once)."""
        self._accept_terms, self._write = accept_terms, write or output.say
        self._state: State | None = None
        self._line_at = float("-inf")
        self._warned = float("-inf")
        self._why, self._counts = "", False
        self._is_closed = False

    def welcome(self, terms: Terms, login: LoginChoice | None) -> None:
        for line in terms_lines(terms):
            self._write(line)
        agree(terms, login, accept_terms=self._accept_terms, can_answer=can_answer(None), say=self.say)

    def show(self, progress: Progress) -> None:
        self._show_plan(progress)
        self._show_warnings(progress)
        now = time.monotonic()
        state = "training" if progress.state == "averaging" else progress.state  # several times a minute
        begins_to_count = progress.my_samples > 0 and not self._counts
        if state != self._state or begins_to_count or now - self._line_at >= LINE_EVERY:
            self._state, self._line_at, self._counts = state, now, progress.my_samples > 0
            self._write(status_line(progress))

    def pump(self, seconds: float = 0.0) -> list[Wish]:
        time.sleep(seconds)
        return []

    def say(self, line: str) -> None:
        for part in words.plain_lines(line).split("\n"):
            self._write(part)

    def close(self, progress: Progress | None = None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for line in words.summary(progress) if progress else []:
            self._write(line)

    def _show_plan(self, progress: Progress) -> None:
        if progress.plan and progress.plan != self._why:
            self._why = progress.plan
            self._write(f"{words.plan(progress)}. {words.plain(progress.why)}")

    def _show_warnings(self, progress: Progress) -> None:
        for when, text in progress.warnings:
            if when > self._warned:
                self._warned = when
                self._write(f"Warning: {words.plain(text, words.LONGEST_WARNING)}")


def status_line(progress: Progress) -> str:
    """State and numbers in one line."""
    parts = [words.headline(progress)]
    if progress.state in ("training", "averaging"):
        facts = {fact.label: fact.value for fact in words.facts(progress)}
        named = [f"{label.lower()} {facts[label]}" for label in ("Your samples", "Your speed", "Global step")]
        parts += [words.step_line(progress), ", ".join(named), words.loss_line(progress)]
    return ". ".join(parts)
