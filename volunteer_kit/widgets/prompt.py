"""Terms and login by one typed answer: in terminals, and in notebooks whose buttons get no events."""

from __future__ import annotations

import getpass
from collections.abc import Callable

from volunteer_kit.widgets.surface import (
    NOT_STARTED,
    Browser,
    Declined,
    LoginChoice,
    TermsError,
    no_login,
    nobody_answers,
)
from volunteer_kit.widgets.terms import Terms
from volunteer_kit.widgets.words import plain

ATTEMPTS = 5  # typed tokens
YES = ("", "y", "yes")
TOKEN_HINT = (  # of the URL
    "A token: make one of the kind “fine-grained” with no box ticked, which tells only who you are: {}\n"
    "Whoever gets hold of a read token can read your private repositories."
)
CODE_WITHIN = 15.0  # s for the Hub to give a link and a code


def terms_lines(terms: Terms) -> list[str]:
    """The screen as text."""
    help_line = [f"Help: {plain(terms.help_url)}"] if terms.help_url else []
    return [terms.title, "", *(f"{heading}: {text}" for heading, text in terms.points()), *help_line, ""]


def agree(
    terms: Terms, login: LoginChoice | None, *, accept_terms: bool, can_answer: bool, say: Callable[[str], None]
) -> None:
    """Ask for one answer that accepts and logs in. The terms are on the screen already.

    Raises Declined, or TermsError where nobody can answer.
    """
    is_in = login is None or login.name is not None
    if not can_answer:
        if not accept_terms:
            raise nobody_answers(terms)
        if not is_in:
            raise no_login(login)
        return
    try:
        if not is_in:
            _log_in(login, say)
        elif not accept_terms:
            who = f" as {login.name}" if login else ""
            if input(f"Press Enter to start{who} (n, stop or Ctrl-C: no) ").strip().lower() not in YES:
                raise Declined(NOT_STARTED)
    except (KeyboardInterrupt, EOFError):
        raise Declined(NOT_STARTED) from None
    finally:
        if login is not None:
            login.close()


def _log_in(login: LoginChoice, say: Callable[[str], None]) -> None:
    begun = login.browser()  # may add a note
    for note in login.notes:
        say(note)
    browser = _show_link(begun, say)
    say(TOKEN_HINT.format(plain(login.token_url)))
    for _ in range(ATTEMPTS):
        token = getpass.getpass(_question(browser))
        try:
            name = login.check(token) if token.strip() else _from_browser(login, browser, say)
        except PermissionError as error:
            say(str(error))
            browser = browser if browser and browser.is_waiting else None
            continue
        if name:
            say(f"Logged in as {plain(name)}.")
            return
    steps = f"1. Make a token, kind “fine-grained”, no box ticked: {login.token_url}\n2. Run it again."
    raise TermsError(f"No login after {ATTEMPTS} attempts.\n{steps}")


def _show_link(browser: Browser | None, say: Callable[[str], None]) -> Browser | None:
    if browser is None:
        return None
    for _ in range(int(10 * CODE_WITHIN)):
        if browser.link or not browser.is_waiting:
            break
        browser.wait(0.1)
    if not browser.link:
        return None
    say(f"Log in with your browser: {plain(browser.link)} with the code {plain(browser.code or '')}")
    return browser


def _question(browser: Browser | None) -> str:
    if browser is None:
        return "Your token, then Enter, which starts (nothing is shown; stop or Ctrl-C: no): "
    return "Logged in with the browser? Press Enter, which starts. Or paste your token (nothing is shown): "


def _from_browser(login: LoginChoice, browser: Browser | None, say: Callable[[str], None]) -> str | None:
    if browser is None:
        say("Nothing was typed.")
        return None
    say("Waiting for your login in the browser ...")
    while browser.is_waiting:
        browser.wait(0.2)
    name = login.from_browser()
    if name is None and browser.error is not None:
        raise browser.error
    return name
