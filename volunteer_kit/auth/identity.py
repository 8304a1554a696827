"""Asking the Hub whose token this is and what it may do; each way to fail in plain words with the next step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from volunteer_kit.http_client import ask_loopback_directly, blamed_on_proxy, retry_after
from volunteer_kit.packages import setup_command

TOKEN_URL = "https://huggingface.co/settings/tokens/new?tokenType=fineGrained"
READ_TOKEN_URL = "https://huggingface.co/settings/tokens/new?tokenType=read"
GIVES_AWAY = "   Whoever gets hold of a read token can read your private repositories."
MAKE_A_TOKEN = f"Make a token, kind “fine-grained”, no box ticked: it tells only who you are. {TOKEN_URL}\n{GIVES_AWAY}"
ANSWER_WITHIN = 20.0  # s for one question; the client itself would wait for ever
PAUSES = (1.0, 3.0)  # s before asking again when the line or the Hub failed

Kind = Literal[
    "malformed",  # no token at all: pasted with a line in it, an organization's, another site's
    "wrong",  # the Hub does not know it
    "expired",
    "network",  # the Hub cannot be reached
    "down",  # the Hub answers with an error of its own
    "limit",  # asked too often
    "organization",  # the person is not in it
    "can_write",  # refused for an authority
    "unknown_rights",  # it cannot be told whether it may write; refused for an authority
    "denied",  # the browser login, by the person
    "timeout",  # the browser login took too long
    "unsupported",  # this huggingface_hub has no browser login
    "missing",  # huggingface_hub is not installed
]
LATER: tuple[Kind, ...] = ("network", "down", "limit", "missing")  # no other token would do better now
T = TypeVar("T")


class LoginError(PermissionError):
    """No login; str() says what happened and what to do. `kind` is for programs. Never has the token in it.

    `retry_after`: s that the Hub or the run's authority asks for before the next question; None: it named none.
    """

    def __init__(self, kind: Kind, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.kind, self.retry_after = kind, retry_after

    @property
    def first_line(self) -> str:
        return str(self).partition("\n")[0]


@dataclass(frozen=True)
class Identity:
    """Somebody whom the Hub knows. The token is in no repr and no str; ask for it by name."""

    name: str
    orgs: tuple[str, ...] = ()
    token: str = field(default="", repr=False)
    hub_id: str = field(default="", repr=False)  # stays when the account is renamed

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("An Identity holds a token and is not pickled; send name and orgs.")


def check(
    token: str, *, for_authority: bool = False, organization: str | None = None, scope: str | None = None
) -> Identity:
    """Whose token this is, by the real client's whoami. The token goes to the Hub's endpoint (HF_ENDPOINT) only.

    `for_authority`: the token will be shown to a run's authority too, so one that can write is refused, and so is one
    of which that cannot be told. `organization`: the person has to be in it. `scope`: of a browser login, as the Hub
    granted it ("openid profile"). Raises LoginError.
    """
    token = tidy(token)
    answer = _ask_patiently(token)
    name = str(answer.get("name") or "")
    orgs = tuple(str(org.get("name")) for org in answer.get("orgs") or [] if isinstance(org, dict))
    access = (answer.get("auth") or {}).get("accessToken") or {}
    if answer.get("type") not in (None, "user") or not name:
        raise LoginError("malformed", _steps("This is the token of an organization, not of a person.", *_TOKEN_STEPS))
    if for_authority:
        _refuse_writing(access, scope)
    if organization and organization.lower() not in (org.lower() for org in orgs):
        raise LoginError("organization", _not_in(organization, name, access))
    return Identity(name, orgs, token, str(answer.get("id") or ""))


def tidy(token: str) -> str:
    """Without the blanks and quotes that come along when pasting. Raises LoginError for what cannot be a token."""
    token = token.strip().strip("\"'").strip()
    is_plain = token.isascii() and token.isprintable() and " " not in token
    if not token or not is_plain or len(token) > 4096:
        raise LoginError("malformed", _steps("This is no token: one is a single word, hf_ and letters.", *_TOKEN_STEPS))
    if token.startswith("api_org"):
        raise LoginError("malformed", _steps("This is the token of an organization, not of a person.", *_TOKEN_STEPS))
    return token


def in_time(ask: Callable[[], T], seconds: float = ANSWER_WITHIN) -> T:
    """Call it in a thread, so that it can be interrupted and ends. Raises TimeoutError, and what `ask` raises."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(ask())
        except BaseException as error:  # handed over to the one who waits
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < until:
        thread.join(0.1)
    if failure:
        raise failure[0]
    if not result:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return result[0]


_TOKEN_STEPS = (MAKE_A_TOKEN, "Paste it whole; it begins with hf_.")


def _steps(what: str, *steps: str) -> str:
    return "\n".join([what, *(f"{number}. {step}" for number, step in enumerate(steps, 1))])


def _ask_patiently(token: str) -> dict[str, Any]:
    for pause in (*PAUSES, None):
        answer = _ask(token)
        if not isinstance(answer, LoginError):
            return answer
        if pause is None or answer.kind not in ("network", "down"):
            break
        time.sleep(pause)
    raise answer


def _ask(token: str) -> dict[str, Any] | LoginError:
    """The error is returned, so that it is raised without the client's own, whose text may quote the header."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        steps = (f"Run: {setup_command()}", "Restart the kernel, and join again.")
        return LoginError("missing", _steps("huggingface_hub is not installed, so nobody can be logged in.", *steps))
    ask_loopback_directly()
    try:
        answer = in_time(lambda: HfApi().whoami(token=token))
    except HfHubHTTPError as error:
        response = error.response
        said = f"{response.headers.get('X-Error-Message', '')} {error.server_message or ''}".lower()
        return _refusal(response.status_code, said, retry_after(response.headers.get("Retry-After")))
    except Exception as error:
        if trouble := blamed_on_proxy(_endpoint(), error):
            return LoginError("network", f"{trouble}\n2. Run it again.")
        is_line = type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "requests", "urllib3", "httpcore")
        if is_line or isinstance(error, OSError):
            return _no_network()
        # a ValueError is an answer that is no JSON: somebody between us and the Hub
        return _refusal(502 if isinstance(error, ValueError) else 500, "")
    return answer if isinstance(answer, dict) else _refusal(502, "")


def _no_network() -> LoginError:
    if trouble := blamed_on_proxy(_endpoint()):
        return LoginError("network", f"{trouble}\n2. Run it again.")
    what = f"The Hugging Face Hub ({_endpoint()}) cannot be reached from here."
    steps = ("Look whether this machine is online, and whether a proxy or firewall is in between.", "Run it again.")
    return LoginError("network", _steps(what, *steps))


def _refusal(status: int, said: str, wait: float | None = None) -> LoginError:
    if status == 429:
        steps = ("Wait five minutes, then run it again.",)
        return LoginError("limit", _steps("The Hub has been asked for logins too often from here.", *steps), wait)
    if status >= 500:
        steps = ("See https://status.huggingface.co", "Run it again in some minutes.")
        what = f"The Hugging Face Hub has trouble of its own (error {status})."
        return LoginError("down", _steps(what, *steps), wait)
    if "expired" in said:
        return LoginError("expired", _steps("This token has expired.", *_TOKEN_STEPS))
    steps = ("Copy it again, whole; it may also have been deleted.", *_TOKEN_STEPS[:1])
    return LoginError("wrong", _steps("The Hub does not know this token.", *steps))


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _refuse_writing(access: dict[str, Any], scope: str | None) -> None:
    """Whoever holds a token that can write can change its owner's repositories; an authority needs only the name."""
    steps = (MAKE_A_TOKEN, "Use that one here; yours stays as it is.")
    writes = _writing(access, scope)
    if writes is None:
        what = "It cannot be told whether this token can write, and the run's authority must not get one that can."
        raise LoginError("unknown_rights", _steps(what, *steps))
    if writes:
        what = f"This token can write ({writes}), and the run's authority must not get one that can."
        raise LoginError("can_write", _steps(what, *steps))


def _writing(access: dict[str, Any], scope: str | None) -> str | None:
    """What lets this token write: "" for nothing, None if that is not told."""
    role = access.get("role")
    if role == "read":
        return ""
    if role in ("write", "admin"):
        return f"its role is {role}"
    if role == "fineGrained":
        rights = access.get("fineGrained")
        if not isinstance(rights, dict):
            return None
        found = [*(rights.get("global") or [])]
        for entry in rights.get("scoped") or []:
            found += entry.get("permissions") or [] if isinstance(entry, dict) else ["?"]
        return ", ".join(sorted({str(right)[:60] for right in found if not str(right).endswith(".read")})[:3])
    if scope is not None:
        harmless = ("openid", "profile", "email", "read-")
        return ", ".join(part for part in scope.split() if not part.startswith(harmless))
    return None


def _not_in(organization: str, name: str, access: dict[str, Any]) -> str:
    steps = [
        f"Ask to join: https://huggingface.co/{organization} (“Request to join this org”), or ask the host.",
        "When you are in, run it again.",
    ]
    if access.get("role") == "fineGrained":
        steps.append(
            f"If you are in: fine-grained tokens may hide it, read tokens do not: {READ_TOKEN_URL}\n{GIVES_AWAY}"
        )
    return _steps(f"{name} is not in the organization {organization}, whose members train this run.", *steps)
