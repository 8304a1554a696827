"""The Hub's files by address: where hf:// names lie, who logs in for them, and what a refusal means.

The volunteer's token goes to the Hub itself, for files of its repositories; never to the stores that it sends us on to,
and never to the Hub where another server sent us there.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import unquote, urlsplit

import requests

from .addresses import AddressPolicy, without_login
from .errors import DataError

OFFICIAL = "https://huggingface.co"
FORM = "hf://datasets/ORG/NAME/PATH.tar"
_HF = re.compile(
    r"hf://(?P<kind>datasets/|spaces/)?(?!datasets/|spaces/|buckets/)(?P<repo>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/@]+|[^/@]+))?/(?P<path>[^?#\\]+)",
    re.ASCII | re.IGNORECASE,
)
_REFUSED: set[str] = set()  # tokens that the Hub does not know: it gives such a caller nothing, not even what is public
_LOCK = threading.Lock()

Sign = Callable[[requests.PreparedRequest], requests.PreparedRequest]


def hub_url(name: str) -> str:
    """hf://datasets/ORG/NAME[@REVISION]/PATH, or hf://ORG/NAME/PATH of a model's repository -> its address at the Hub.
    Raises DataError for another form. No look-up."""
    from huggingface_hub import hf_hub_url

    match = _HF.fullmatch(name)
    path = match["path"] if match else ""
    revision = unquote(match["revision"] or "main") if match else ""
    if not path or any(part in ("", ".", "..") for part in (*path.split("/"), *revision.split("/"))):
        raise DataError(f"{without_login(name)[:200]!r} is no address of a file on the Hub.\n1. Write it like {FORM}")
    kind = {"datasets/": "dataset", "spaces/": "space"}.get((match["kind"] or "").lower(), "model")
    return hf_hub_url(match["repo"], path, repo_type=kind, revision=revision)


def hub_addresses(allowed: AddressPolicy) -> AddressPolicy:
    """Which servers the Hub may send us on to: any, where this machine uses a mirror of its own (HF_ENDPOINT)."""
    return allowed if _endpoint() == OFFICIAL else replace(allowed, allows="any")


def hub_login(url: str) -> Sign | None:
    """Returns the signer of a request for a file of the Hub's repositories; None for every other address, and where
    this machine is not logged in."""
    if not re.search(r"/resolve(-cache)?/", url) or not is_at_hub(url):  # small files are sent on to the Hub's cache
        return None
    from huggingface_hub import constants, get_token

    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    with _LOCK:
        if token is None or token in _REFUSED:
            return None

    def sign(request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {token}"
        return request

    return sign


def forget_login() -> None:
    """The Hub does not know this machine's token (HTTP 401): what is public can be read without one."""
    from huggingface_hub import get_token

    with _LOCK:
        _REFUSED.add(get_token() or "")


def is_at_hub(url: str) -> bool:
    """Whether an address is the Hub's own: its scheme, host and port."""
    return url.lower().split("/")[:3] == _endpoint().lower().split("/")[:3]


def refusal(url: str, response: requests.Response) -> str | None:
    """Why the Hub does not give a file, and what to do, in one line; None where the answer has another reason."""
    code, status = response.headers.get("X-Error-Code", ""), response.status_code
    if not is_at_hub(url) or (status not in (401, 403) and not (status == 404 and code == "RepoNotFound")):
        return None
    page = url.partition("/resolve/")[0]
    repo = urlsplit(page).path.removeprefix("/datasets/").strip("/")
    if code == "GatedRepo":
        return (
            f"{repo} is gated, and this login is not among those who may read it: accept its terms at {page}, and log "
            "in with that account: hf auth login"
        )
    if status == 403:
        return f"the Hub refuses to give {repo} to this login (HTTP 403): look at {page}, and log in: hf auth login"
    return (
        f"there is no {repo} on the Hub, or it is private (HTTP {status}): look at {page}, and log in with an account "
        "that may read it: hf auth login"
    )


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT
