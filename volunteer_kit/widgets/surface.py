"""One picture for every place: a notebook with widgets, a notebook without, a terminal, a pipe."""

from __future__ import annotations

import shlex
import sys
from typing import Any, Literal, Protocol, runtime_checkable

from volunteer_kit.widgets.kernel_events import find_kernel, kernel_events
from volunteer_kit.widgets.progress import Progress
from volunteer_kit.widgets.terms import Terms

Wish = Literal["pause", "resume", "leave", "detach"]
Kind = Literal["auto", "notebook", "html", "terminal", "text"]
NOT_STARTED = "You did not start: no training has begun."
DRAW_EVERY = 0.5  # s between two pictures


class Declined(Exception):
    """The person did not accept; str() says so in words."""


class TermsError(PermissionError):
    """Nobody is here who could accept; str() has the ways out."""


class Browser(Protocol):
    """A login in the browser that is under way (auth.browser.BrowserLogin)."""

    link: str | None
    code: str | None
    error: Exception | None

    @property
    def is_waiting(self) -> bool: ...

    def wait(self, seconds: float) -> bool: ...


class LoginChoice(Protocol):
    """What a screen needs to log somebody in (auth.login.Login)."""

    notes: list[str]
    organization: str | None
    token_url: str

    @property
    def name(self) -> str | None: ...

    def check(self, token: str) -> str: ...

    def browser(self) -> Browser | None: ...

    def from_browser(self) -> str | None: ...

    def close(self) -> None: ...


@runtime_checkable
class Surface(Protocol):
    """Where a volunteer looks. All of it is called from the main thread."""

    def welcome(self, terms: Terms, login: LoginChoice | None) -> None:
        """One screen, one button; blocks until the terms are accepted and, with `login`, somebody is logged in.

        Raises Declined, or TermsError where nobody can answer.
        """

    def show(self, progress: Progress) -> None:
        """Draw, at most twice a second; call it as often as you like."""

    def pump(self, seconds: float = 0.0) -> list[Wish]:
        """Wait so long, serving buttons; what was asked for since. Raises KeyboardInterrupt from the stop button."""

    def say(self, line: str) -> None:
        """One line beside the picture."""

    def close(self, progress: Progress | None = None) -> None:
        """The last, static picture; None: take it all away. Calling it again does nothing."""


def open_surface(kind: Kind = "auto", *, accept_terms: bool = False) -> Surface:
    """The best surface of this place. `accept_terms`: the caller has accepted; the screen does not ask again.

    Raises ValueError for a `kind` that cannot be had here.
    """
    if kind == "auto":
        kind = best_kind()
    if kind == "notebook":
        from volunteer_kit.widgets.notebook import NotebookSurface

        return NotebookSurface(accept_terms=accept_terms)
    if kind == "html":
        from volunteer_kit.widgets.html import HtmlSurface

        return HtmlSurface(accept_terms=accept_terms)
    if kind == "terminal":
        from volunteer_kit.widgets.terminal import TerminalSurface

        return TerminalSurface(accept_terms=accept_terms)
    if kind == "text":
        from volunteer_kit.widgets.text import TextSurface

        return TextSurface(accept_terms=accept_terms)
    raise ValueError(f"{kind!r} is no surface; there are auto, notebook, html, terminal and text.")


def best_kind() -> Kind:
    """What can be shown here: widgets need ipywidgets and a kernel whose messages we can serve."""
    if find_kernel() is not None:
        return "notebook" if _has("ipywidgets") and kernel_events() is not None else "html"
    return "terminal" if sys.stdout.isatty() and _has("rich") else "text"


def nobody_answers(terms: Terms) -> TermsError:
    """For programs and pipes."""
    run = terms.run or terms.run_id
    command = f"volunteer-kit join {shlex.quote(run)}"
    return TermsError(
        "The terms above have to be accepted by a person, and nobody can answer here.\n"
        f"1. In a terminal: {command}\n"
        f"2. If you have read them: {command} --accept-terms, or join_swarm({run!r}, accept_terms=True)"
    )


def no_login(login: LoginChoice) -> TermsError:
    """For programs and pipes, when no login was found."""
    tried = "".join(f"\n   {note}" for note in login.notes)
    return TermsError(
        f"This run needs a login at the Hugging Face Hub, and nobody can type one here.{tried}\n"
        f"1. Put a token, “fine-grained” with no box ticked ({login.token_url}), into HF_TOKEN, or run: hf auth login\n"
        "2. Run it again."
    )


def _has(module: str) -> bool:
    try:
        __import__(module)
    except Exception:  # a broken one is as good as none
        return False
    return True


def can_answer(kernel: Any | None) -> bool:
    """Whether there is a person at the other end of this kernel, or of standard input."""
    if kernel is not None:
        return bool(getattr(kernel, "_allow_stdin", True))
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
