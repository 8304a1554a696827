"""The Hub's login in the browser (RFC 8628, device code), by the real client, in a thread that can be called off."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from volunteer_kit.auth.identity import MAKE_A_TOKEN, LoginError, _no_network, _steps

LONGEST = 600.0  # s that we wait for a person to log in; the Hub's codes live 5 to 15 min
_client_lock = threading.Lock()


def why_no_browser() -> str | None:
    """In words, where the Hub's client is too old for a login in the browser; Kaggle's is."""
    try:
        importlib.import_module("huggingface_hub.utils._oauth_device")
    except ImportError:
        version = importlib.metadata.version("huggingface_hub")
        return f"huggingface_hub {version} has no login in the browser, so it takes a token here."
    return None


class Granted(NamedTuple):
    """What the Hub gave; its repr is hidden."""

    token: str
    scope: str | None

    def __repr__(self) -> str:
        return "Granted(...)"


class BrowserLogin:
    """One attempt. `link` and `code` are None until the Hub gave them, `error` until it failed."""

    def __init__(self, client_id: str | None = None, longest: float = LONGEST) -> None:
        """`client_id`: of the host's OAuth app at the Hub (None: the client's own, whose tokens can write)."""
        self.link: str | None = None
        self.code: str | None = None
        self.error: LoginError | None = None
        self._granted: Granted | None = None
        self._ended = threading.Event()
        self._is_off = threading.Event()
        threading.Thread(target=self._run, args=(client_id, longest), daemon=True).start()

    def __repr__(self) -> str:
        return f"BrowserLogin({'ended' if self._ended.is_set() else 'waiting'})"

    @property
    def is_waiting(self) -> bool:
        return not self._ended.is_set()

    def take(self) -> Granted | None:
        """What was granted, once; None while nothing was."""
        granted, self._granted = self._granted, None
        return granted

    def wait(self, seconds: float) -> bool:
        """For the end of it, good or bad."""
        return self._ended.wait(seconds)

    def cancel(self) -> None:
        """Call it off: what would come now is dropped, and the Hub is asked no more."""
        self._is_off.set()

    def _run(self, client_id: str | None, longest: float) -> None:
        try:
            self._granted = self._log_in(client_id, longest)
        except LoginError as error:
            self.error = error
        except _CalledOff:
            pass
        except Exception as error:
            what = f"The login in the browser broke ({type(error).__name__})."
            self.error = LoginError("down", _steps(what, *_OTHER))
        finally:
            self._ended.set()

    def _log_in(self, client_id: str | None, longest: float) -> Granted | None:
        if (why := why_no_browser()) is not None:
            raise LoginError("unsupported", _steps(why, *_OTHER))
        from huggingface_hub.errors import DeviceCodeError
        from huggingface_hub.utils._oauth_device import poll_device_token, request_device_code

        try:
            with _as_app(client_id):
                info = request_device_code()
                info["expires_in"] = min(float(info["expires_in"]), longest)
                self.link, self.code = str(info["verification_uri_complete"]), str(info["user_code"])
                answer: Any = poll_device_token(info, on_pending=self._look)
        except DeviceCodeError as error:
            kind = str(getattr(error.error_code, "value", error.error_code) or "")
        else:
            self._look()
            return Granted(str(answer["access_token"]), answer.get("scope"))
        if kind == "access_denied":
            raise LoginError("denied", _steps("The login in the browser was refused there.", *_OTHER))
        if kind == "expired_token":
            raise LoginError("timeout", _steps("Nobody logged in with the browser in time.", "Run it again.", *_OTHER))
        if self.link is None:
            raise _no_network()
        raise LoginError("down", _steps("The Hub did not complete the login in the browser.", *_OTHER))

    def _look(self) -> None:
        if self._is_off.is_set():
            raise _CalledOff


_OTHER = (f"Or paste a token. {MAKE_A_TOKEN}",)


class _CalledOff(Exception):
    pass


@contextlib.contextmanager
def _as_app(client_id: str | None) -> Iterator[None]:
    """The client takes its OAuth app from a constant; the run's own asks for less than everything."""
    from huggingface_hub import constants

    if client_id is None:
        yield
        return
    with _client_lock:
        before, constants.DEVICE_CODE_OAUTH_CLIENT_ID = constants.DEVICE_CODE_OAUTH_CLIENT_ID, client_id
        try:
            yield
        finally:
            constants.DEVICE_CODE_OAUTH_CLIENT_ID = before
