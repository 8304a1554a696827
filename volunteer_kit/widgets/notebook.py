"""Plain ipywidgets, drawn from the main thread only; callbacks set flags, whichever thread they come in."""

from __future__ import annotations

import time
from typing import Any

from volunteer_kit.widgets import page, words
from volunteer_kit.widgets.boxes import ShownBox
from volunteer_kit.widgets.kernel_events import KernelEvents, find_kernel, kernel_events
from volunteer_kit.widgets.progress import Progress
from volunteer_kit.widgets.prompt import agree
from volunteer_kit.widgets.surface import DRAW_EVERY, NOT_STARTED, Declined, LoginChoice, Wish, can_answer
from volunteer_kit.widgets.terms import Terms
from volunteer_kit.widgets.welcome import Welcome

BUTTON = {"width": "auto", "min_width": "120px"}
TICK = 0.1  # s between two looks at the buttons


class NotebookSurface:
    """Needs ipywidgets 7 or 8, and a kernel whose messages can be served while a cell runs."""

    def __init__(self, *, accept_terms: bool = False, events: KernelEvents | None = None) -> None:
        self._accept_terms = accept_terms
        self._events = events or kernel_events()
        self._wishes: list[Wish] = []
        self._view: _View | None = None
        self._drawn_at = float("-inf")
        self._is_closed = False

    def welcome(self, terms: Terms, login: LoginChoice | None) -> None:
        answers = can_answer(find_kernel())
        is_settled = self._accept_terms and (login is None or login.name is not None)
        if is_settled or not answers:
            show_html(page.STYLE + page.terms(terms))
            agree(terms, login, accept_terms=self._accept_terms, can_answer=answers and not is_settled, say=self.say)
            return
        try:
            screen = Welcome(terms, login)
            is_agreed = False
            try:
                while not (is_agreed := screen.step()):
                    if "detach" in self.pump(TICK):
                        raise Declined("The cell was run again; it goes on there.")
            finally:
                screen.close(is_agreed)
        except KeyboardInterrupt:
            raise Declined(NOT_STARTED) from None

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if self._is_closed or now - self._drawn_at < DRAW_EVERY:
            return
        self._drawn_at = now
        if self._view is None:
            self._view = _View(self._wishes)
        self._view.update(progress)

    def pump(self, seconds: float = 0.0) -> list[Wish]:
        if self._events is None:
            time.sleep(seconds)
        else:
            self._events.pump(seconds)
            if self._events.run_again and "detach" not in self._wishes:
                self._wishes.append("detach")
        taken = self._wishes[:]  # a callback's thread may append meanwhile
        del self._wishes[: len(taken)]
        return taken

    def say(self, line: str) -> None:
        print(words.plain_lines(line), flush=True)

    def close(self, progress: Progress | None = None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        last = page.progress_page(progress) if progress is not None else ""
        if self._view is not None:
            self._view.close(last)
        elif last:
            show_html(last)


class _View:
    """The progress: a block that changes all the time, buttons, and blocks that change seldom.

    Apart, so that a folded text stays open and pictures are not sent again and again.
    """

    def __init__(self, wishes: list[Wish]) -> None:
        import ipywidgets

        self._wishes = wishes
        self._blocks = {name: ipywidgets.HTML() for name in ("style", "live", "notes", "plan", "pictures")}
        self._blocks["style"].value = page.STYLE
        self._pause = ipywidgets.Button(description="Pause", icon="pause", layout=BUTTON)
        self._leave = ipywidgets.Button(description="Leave", icon="sign-out", layout=BUTTON)
        self._pause.add_class("vk-pause")
        self._leave.add_class("vk-leave")
        self._pause.on_click(lambda button: wishes.append("resume" if button.description == "Resume" else "pause"))
        self._leave.on_click(lambda _: wishes.append("leave"))
        blocks = self._blocks
        buttons = ipywidgets.HBox([self._pause, self._leave])
        rows = [blocks["style"], blocks["live"], buttons, blocks["notes"], blocks["plan"], blocks["pictures"]]
        self._shown = ShownBox(ipywidgets.VBox(rows))

    def update(self, progress: Progress) -> None:
        self._set("live", page.live(progress))
        self._set("notes", page.notes(progress))
        self._set("plan", page.plan(progress))
        self._set("pictures", page.pictures(progress.pictures))
        is_over = progress.state in (*words.ENDED, "leaving")
        is_paused = progress.state == "paused"
        _set(self._pause, description="Resume" if is_paused else "Pause", icon="play" if is_paused else "pause")
        _set(self._pause, disabled=is_over or progress.is_elsewhere)
        _set(self._leave, disabled=is_over, description="Stop looking" if progress.is_elsewhere else "Leave")

    def close(self, last: str) -> None:
        self._shown.replace(last)

    def _set(self, name: str, html: str) -> None:
        _set(self._blocks[name], value=html)


def show_html(html: str) -> None:
    """One output that stays."""
    from IPython.display import HTML, display

    display(HTML(html))


def _set(widget: Any, **values: Any) -> None:
    for name, value in values.items():
        if getattr(widget, name) != value:
            setattr(widget, name, value)
