"""Notebooks without widgets, or whose buttons get no events: HTML that is updated in place, and typed answers."""

from __future__ import annotations

import time
from typing import Any

from volunteer_kit.widgets import page, words
from volunteer_kit.widgets.kernel_events import find_kernel, kernel_events
from volunteer_kit.widgets.progress import Progress
from volunteer_kit.widgets.prompt import agree
from volunteer_kit.widgets.surface import DRAW_EVERY, LoginChoice, Wish, can_answer
from volunteer_kit.widgets.terms import Terms


class HtmlSurface:
    """Needs IPython. The stop button leaves; there are no others."""

    def __init__(self, *, accept_terms: bool = False) -> None:
        self._accept_terms = accept_terms
        self._blocks: dict[str, _Block] = {}
        self._events = kernel_events()
        self._drawn_at = float("-inf")
        self._is_closed = False

    def welcome(self, terms: Terms, login: LoginChoice | None) -> None:
        self._draw("terms", page.STYLE + page.terms(terms))
        answers = can_answer(find_kernel())
        agree(terms, login, accept_terms=self._accept_terms, can_answer=answers, say=self.say)
        self._draw("terms", page.agreed(terms))

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if self._is_closed or now - self._drawn_at < DRAW_EVERY:
            return
        self._drawn_at = now
        self._draw("live", page.STYLE + page.live(progress) + page.notes(progress))
        self._draw("plan", page.plan(progress))  # apart: redrawing would fold it while somebody reads
        self._draw("pictures", page.pictures(progress.pictures))

    def pump(self, seconds: float = 0.0) -> list[Wish]:
        if self._events is None:
            time.sleep(seconds)
            return []
        self._events.pump(seconds)
        return ["detach"] if self._events.run_again else []

    def say(self, line: str) -> None:
        print(words.plain_lines(line), flush=True)

    def close(self, progress: Progress | None = None) -> None:
        if self._is_closed:
            return
        if progress is not None:
            self._drawn_at = float("-inf")
            self.show(progress)
        else:
            for name in self._blocks:
                self._blocks[name].update("")
        self._is_closed = True

    def _draw(self, name: str, html: str) -> None:
        if name not in self._blocks:
            if not html:
                return
            self._blocks[name] = _Block()
        self._blocks[name].update(html)


class _Block:
    """One output of the cell; shown at first, replaced after."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._html: str | None = None

    def update(self, html: str) -> None:
        from IPython.display import HTML, display

        if html == self._html:
            return
        self._html = html
        if self._handle is None:
            self._handle = display(HTML(html), display_id=True)
        else:
            self._handle.update(HTML(html))
