"""The first screen in a notebook: terms, login, one button."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from volunteer_kit.widgets import page, words
from volunteer_kit.widgets.boxes import ShownBox
from volunteer_kit.widgets.surface import LoginChoice
from volunteer_kit.widgets.terms import Terms


class Welcome:
    """Shown from the moment it is built; step() until it is true."""

    def __init__(self, terms: Terms, login: LoginChoice | None) -> None:
        import ipywidgets

        self._login = login
        self._pressed = threading.Event()
        self._links = ipywidgets.HTML()
        self._message = ipywidgets.HTML()
        self._field = _secret_field() if self._asks else None
        self._token = ""  # as it was typed
        self._button = ipywidgets.Button(button_style="primary", layout={"width": "auto", "min_width": "160px"})
        self._button.add_class("vk-start")
        self._button.on_click(lambda _: self._pressed.set())
        self._browser = login.browser() if self._asks else None
        rows = [ipywidgets.HTML(page.STYLE + page.terms(terms)), self._links]
        if self._asks:
            hint = page.token_hint(login.token_url, bool(self._browser), terms.checked_by)
            rows += [ipywidgets.HTML(hint), self._field]
        layout = {"align_items": "flex-start"}  # or the button is as wide as the page
        box = ipywidgets.VBox([*rows, self._button, self._message], layout=layout)
        self._notes = list(login.notes) if login else []
        self._terms = terms
        self._draw()
        self._shown = ShownBox(box)

    @property
    def _asks(self) -> bool:
        return self._login is not None and self._login.name is None

    def step(self) -> bool:
        """Look at what was pressed, typed, or done in the browser; true when it is settled."""
        self._look_at_the_browser()
        is_pressed = self._pressed.is_set()  # before the field is looked at: what was typed before comes before
        self._take_the_token()
        if not is_pressed:
            return False
        self._pressed.clear()
        if not self._asks:
            return True
        token, self._token = self._token, ""
        if not token.strip():
            self._say("Log in first: with the link, or with a token.", is_error=True)
            return False
        self._say("Asking the Hub ...")
        try:
            self._login.check(token)
        except PermissionError as error:
            self._say(str(error), is_error=True)
            return False
        return True

    def close(self, is_agreed: bool) -> None:
        """The fields are gone; what was agreed to stays, folded."""
        self._token = ""
        if self._field is not None:
            with contextlib.suppress(Exception):  # the page may be gone
                self._field.value = ""
        if self._login is not None:
            self._login.close()
        self._shown.replace(page.agreed(self._terms) if is_agreed else "")

    def _take_the_token(self) -> None:
        """Out of the field at once: pages store the values of widgets."""
        if self._field is not None and self._field.value:
            self._token, self._field.value = self._field.value, ""
            self._say("Your token is here. Press Start.")

    def _look_at_the_browser(self) -> None:
        if self._browser is None or not self._asks:
            return
        try:
            name = self._login.from_browser()
            if name is None and self._browser.error is not None:
                raise self._browser.error
        except PermissionError as error:
            self._browser = None
            self._notes.append(str(error).partition("\n")[0])
            name = None
        if name is not None:
            self._say(f"Logged in as {words.plain(name)}.")
            self._field.disabled = True
        self._draw()

    def _draw(self) -> None:
        who = f" as {words.plain(self._login.name, 60)}" if self._login and self._login.name else ""
        _set(self._button, "description", f"Start{who}")
        link = page.browser_login(self._browser.link, self._browser.code or "") if self._has_link() else ""
        _set(self._links, "value", link + (page.lines(self._notes) if self._notes else ""))

    def _has_link(self) -> bool:
        return self._browser is not None and self._browser.link is not None and self._asks

    def _say(self, text: str, is_error: bool = False) -> None:
        self._message.value = page.lines(text.splitlines(), "error" if is_error else "small")


def _secret_field() -> Any:
    """ipywidgets 8 sends every value back to all pages that look at the kernel; this one it keeps to itself."""
    import ipywidgets
    import traitlets

    class SecretField(ipywidgets.Password):
        value = traitlets.Unicode("").tag(sync=True, echo_update=False)

    field = SecretField(placeholder="hf_...", continuous_update=False, layout={"width": "340px"})
    field.add_class("vk-token")
    return field


def _set(widget: Any, name: str, value: str) -> None:
    if getattr(widget, name) != value:
        setattr(widget, name, value)
