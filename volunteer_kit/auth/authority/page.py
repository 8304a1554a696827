"""The moderators' web page, /moderate. Forms only, no script, so the browser is told to run none.

Against forged requests: the session's cookie goes to no request that another site makes (SameSite=Strict) and no script
can read it; each form carries a key of its session; and whoever sends a form must come from this very page (Origin).
"""

from __future__ import annotations

import datetime
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Form, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.exceptions import HTTPException

from volunteer_kit.auth.authority.api import TheModerators, address_of, at_the_hub, paced
from volunteer_kit.auth.authority.moderators import PAGE, Moderators, Signed
from volunteer_kit.auth.authority.settings import is_loopback
from volunteer_kit.auth.evidence import CAUSES
from volunteer_kit.auth.moderation import MAX_REASON, Refused

HERE = Path(__file__).parent
COOKIE = "vk_moderator"
_templates = Environment(
    loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True,
)  # fmt: skip
STATIC = {"style.css": "text/css", "icon.svg": "image/svg+xml"}
_files = {name: (HERE / "static" / name).read_bytes() for name in STATIC}
Text = Annotated[str, Form(max_length=4096)]


async def came_from(request: Request) -> None:
    """Raises Refused (forged) unless a page of ours sent this. Browsers name the origin with each form."""
    if request.headers.get("origin") not in origins(request):
        what = "This form did not come from the authority's own page."
        raise Refused("forged", f"{what}\n1. Open the page anew, and try again.")


def origins(request: Request) -> set[str]:
    """Where the page may be open: at the run's address, and at this machine's own names when asked there."""
    parts = urlsplit(request.app.state.desk.settings.url)
    here = {f"{parts.scheme}://{parts.netloc}"}
    if is_loopback(request.url.hostname or "") and is_loopback(request.client.host if request.client else ""):
        here.add(f"{request.url.scheme}://{request.url.netloc}")
    return here


async def the_session(request: Request, moderators: TheModerators) -> Signed | None:
    return moderators.sessions.find(request.cookies.get(_cookie(request), ""))


Session = Annotated[Signed | None, Depends(the_session)]
router = APIRouter(prefix="/moderate", include_in_schema=False, dependencies=[paced("read")])


@router.api_route("", methods=["GET", "HEAD"])
def show(
    request: Request,
    moderators: TheModerators,
    session: Session,
    part: Annotated[str, Query(max_length=100)] = "",
    before: Annotated[int | None, Query(ge=1, lt=2**53)] = None,
) -> Response:
    if session is None:
        return _sign_in_page(request)
    said = session.said
    if request.method == "GET":  # after HEAD, it is still to be shown
        session.said = ""
    log, bans = moderators.log(before), moderators.bans()
    return _html(
        "moderate.html", request, session=session, said=said, part=part, before=before, log=log,
        members=moderators.members(part), bans=bans, convictions=moderators.convictions(bans),
        allowlist=request.app.state.desk.settings.allowlist, causes=CAUSES,
        earlier=log[-1].id if len(log) == PAGE else None, most=PAGE, max_reason=MAX_REASON,
    )  # fmt: skip


@router.api_route("/{name}", methods=["GET", "HEAD"])
async def static(name: str) -> Response:
    if name not in STATIC:
        raise HTTPException(404)
    return Response(_files[name], media_type=STATIC[name], headers={"Cache-Control": "max-age=3600"})


@router.post("/sign-in", dependencies=[Depends(came_from), paced("login")])
async def sign_in(request: Request, moderators: TheModerators, token: Text = "") -> Response:
    try:
        secret, _ = await at_the_hub(request, moderators.sign_in, token, address_of(request))
    except Refused as refused:
        return _sign_in_page(request, str(refused), 403)
    return _signed_in(request, secret, RedirectResponse("/moderate", 303))


@router.post("/sign-out", dependencies=[Depends(came_from)])
def sign_out(request: Request, moderators: TheModerators) -> Response:
    moderators.sessions.close(request.cookies.get(_cookie(request), ""))
    response = RedirectResponse("/moderate", 303)
    response.delete_cookie(_cookie(request), path="/moderate")
    return response


@router.post("/{action}", dependencies=[Depends(came_from)])
def act(
    action: str,
    moderators: TheModerators,
    session: Session,
    form_key: Text = "",
    username: Text = "",
    reason: Text = "",
) -> Response:
    if session is None:
        return RedirectResponse("/moderate", 303)
    if not secrets.compare_digest(form_key.encode(), session.form_key.encode()):
        raise Refused("forged", "This form is of another session.\n1. Open the page anew, and try again.")
    by, via = session.name, "page"
    actions: dict[str, Callable[[], str]] = {
        "add": lambda: moderators.add(by, username, via),
        "remove": lambda: moderators.remove(by, username, via),
        "ban": lambda: moderators.ban(by, username, reason, via),
        "unban": lambda: moderators.unban(by, username, via),
    }
    if action not in actions:
        raise HTTPException(404)
    try:
        session.said = actions[action]()
    except Refused as refused:
        session.said = str(refused)
    return RedirectResponse("/moderate", 303)


def error_page(request: Request, message: str, status: int) -> Response:
    """For what went wrong before a page could be shown."""
    return _html("error.html", request, status, error=message)


def _sign_in_page(request: Request, error: str = "", status: int = 200) -> Response:
    with_hub = request.app.state.desk.settings.oauth_client_id is not None
    return _html("sign_in.html", request, status, error=error, with_hub=with_hub)


def _signed_in(request: Request, secret: str, response: Response) -> Response:
    moderators: Moderators = request.app.state.moderators
    lifetime = int(request.app.state.desk.settings.session_lifetime)
    assert moderators.sessions.find(secret)
    response.set_cookie(
        _cookie(request), secret, max_age=lifetime, path="/moderate", httponly=True, samesite="strict",
        secure=request.url.scheme == "https",
    )  # fmt: skip
    return response


def _cookie(request: Request) -> str:
    """On https a name that browsers keep from being set by other hosts or over http."""
    return f"__Secure-{COOKIE}" if request.url.scheme == "https" else COOKIE


def _html(template: str, request: Request, status: int = 200, **values: Any) -> HTMLResponse:
    run_id = request.app.state.desk.settings.run_id
    return HTMLResponse(_templates.get_template(template).render(run_id=run_id, **values), status)


def _ago(moment: float | None) -> str:
    """A time for people: how long ago."""
    if moment is None:
        return "never"
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"


def _moment(moment: float) -> str:
    return datetime.datetime.fromtimestamp(moment, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


_templates.filters.update(ago=_ago, moment=_moment)
