"""The authority's addresses for programs: volunteers' (/v1) and, with a session of their own, moderators'."""

from __future__ import annotations

import base64
import time
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Depends, Header, Query, Request

from volunteer_kit import __version__
from volunteer_kit.auth.authority.convictions import Convictions
from volunteer_kit.auth.authority.desk import Admission, Desk
from volunteer_kit.auth.authority.moderators import PAGE, Moderators, Signed
from volunteer_kit.auth.authority.wire import Admitted, BanThem, Convict, Join, Named, Proven, SignIn
from volunteer_kit.auth.moderation import Refused
from volunteer_kit.bounded_http import household

AT_ONCE = 24  # logins that ask the Hub; when it is slow, they must not take the threads that refreshes need
WAITING = 400  # more of them are told to come back

router = APIRouter(prefix="/v1")


async def desk_of(request: Request) -> Desk:
    return request.app.state.desk


async def moderators_of(request: Request) -> Moderators:
    return request.app.state.moderators


async def convictions_of(request: Request) -> Convictions:
    return request.app.state.convictions


def address_of(request: Request) -> str:
    return household(request.client.host if request.client else "")


def paced(rule: str) -> Any:
    """A dependency that counts the address, before anything else is looked at."""

    async def count(request: Request) -> None:
        request.app.state.desk.pacer.take(rule, address_of(request))

    return Depends(count)


async def at_the_hub(request: Request, ask: Any, *args: Any) -> Any:
    """Call what will ask the Hub in a thread of those set aside for it. Raises Refused (down) when too many wait."""
    limiter = getattr(request.app.state, "hub_limiter", None)
    if limiter is None:
        limiter = request.app.state.hub_limiter = anyio.CapacityLimiter(AT_ONCE)
    if limiter.statistics().tasks_waiting >= WAITING:
        raise Refused("down", "Too many people join at once.\n1. Run it again in a minute.", retry_after=30)
    return await anyio.to_thread.run_sync(ask, *args, limiter=limiter)


TheDesk = Annotated[Desk, Depends(desk_of)]
TheConvictions = Annotated[Convictions, Depends(convictions_of)]
TheModerators = Annotated[Moderators, Depends(moderators_of)]


@router.post("/join", dependencies=[paced("join")])
async def join(request: Request, asked: Join, desk: TheDesk) -> Admitted:
    """A login at the Hub, and the proof of a key -> an access token."""
    token = asked.hf_token.get_secret_value()
    return _admitted(await at_the_hub(request, desk.join, asked, token, address_of(request)))


@router.post("/refresh", dependencies=[paced("refresh")])
def refresh(asked: Proven, desk: TheDesk) -> Admitted:
    """The proof of a key that joined before -> an access token."""
    return _admitted(desk.refresh(asked))


@router.post("/convict", dependencies=[paced("read")])
def convict(asked: Convict, convictions: TheConvictions) -> dict[str, str]:
    """A monitor's proof that most accounts convict a peer -> its account is banned."""
    return {"done": convictions.report(asked)}


@router.head("/bans", dependencies=[paced("read")], include_in_schema=False)
@router.get("/bans", dependencies=[paced("read")])
def bans(desk: TheDesk, known: Annotated[int | None, Query(ge=0, lt=2**53)] = None) -> dict[str, Any]:
    """Who is shut out, and who was let in again, by digest; `accounts` is null if the list is the `known` version."""
    published = desk.published()
    version, statement = published.bans.version, base64.b64encode(published.statement).decode()
    if known == version:
        return {"version": version, "accounts": None, "statement": statement}
    accounts = sorted(account.hex() for account in published.bans.accounts)
    pardons = base64.b64encode(published.pardons).decode()
    return {"version": version, "accounts": accounts, "statement": statement, "pardons": pardons}


@router.head("/run", dependencies=[paced("read")], include_in_schema=False)
@router.get("/run", dependencies=[paced("read")])
def run(desk: TheDesk) -> dict[str, Any]:
    """Which run this is, by which kit, whom it lets in, and the certificate of the key that signs."""
    settings = desk.settings
    return {
        "run_id": settings.run_id,
        "kit": __version__,
        "allowlist": settings.allowlist.kind,
        "organization": settings.allowlist.organization,
        "oauth_client_id": settings.oauth_client_id,
        "run_file": settings.run_link or None,
        "time": int(time.time()),
        "certificates": [base64.b64encode(desk.signer().certificate.to_bytes()).decode()],
    }


# --- moderators ---


async def signed_in(moderators: TheModerators, authorization: Annotated[str, Header(max_length=200)] = "") -> Signed:
    """By the header alone: a cookie would come along with what another site makes a browser send."""
    kind, _, secret = authorization.partition(" ")
    found = moderators.sessions.find(secret) if kind.lower() == "bearer" else None
    if found is None:
        raise Refused("session", "Sign in first, as a moderator: this session is unknown or has ended.")
    return found


Moderator = Annotated[Signed, Depends(signed_in)]
moderate = APIRouter(prefix="/v1/moderate", dependencies=[paced("read")])


@moderate.post("/session", dependencies=[paced("login")])
async def sign_in(request: Request, asked: SignIn, moderators: TheModerators) -> dict[str, Any]:
    token = asked.hf_token.get_secret_value()
    secret, name = await at_the_hub(request, moderators.sign_in, token, address_of(request))
    return {"session": secret, "username": name}


@moderate.delete("/session")
def sign_out(
    moderators: TheModerators, by: Moderator, authorization: Annotated[str, Header(max_length=200)] = ""
) -> dict[str, str]:
    moderators.sessions.close(authorization.partition(" ")[2])
    return {"done": f"{by.name} is signed out."}


@moderate.get("/members")
def members(
    moderators: TheModerators,
    by: Moderator,
    part: Annotated[str, Query(max_length=96, pattern=r"^[A-Za-z0-9_.-]*$")] = "",
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> dict[str, Any]:
    return {"members": [member._asdict() for member in moderators.members(part, limit)]}


@moderate.get("/bans")
def list_bans(moderators: TheModerators, by: Moderator) -> dict[str, Any]:
    bans = moderators.bans()
    convictions = moderators.convictions(bans)
    return {"bans": [{**vars(ban), "conviction": convictions.get(ban.name)} for ban in bans]}


@moderate.get("/log")
def log(
    moderators: TheModerators,
    by: Moderator,
    before: Annotated[int | None, Query(ge=1, lt=2**53)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = PAGE,
) -> dict[str, Any]:
    """`before`: the id of the last entry that one has."""
    return {"log": [entry._asdict() for entry in moderators.log(before, limit)]}


@moderate.post("/add")
def add(moderators: TheModerators, by: Moderator, asked: Named) -> dict[str, str]:
    return {"done": moderators.add(by.name, asked.username, "api")}


@moderate.post("/remove")
def remove(moderators: TheModerators, by: Moderator, asked: Named) -> dict[str, str]:
    return {"done": moderators.remove(by.name, asked.username, "api")}


@moderate.post("/ban")
def ban(moderators: TheModerators, by: Moderator, asked: BanThem) -> dict[str, str]:
    return {"done": moderators.ban(by.name, asked.username, asked.reason, "api")}


@moderate.post("/unban")
def unban(moderators: TheModerators, by: Moderator, asked: Named) -> dict[str, str]:
    return {"done": moderators.unban(by.name, asked.username, "api")}


def _admitted(given: Admission) -> Admitted:
    return Admitted(
        token=base64.b64encode(given.token).decode(),
        expires_at=given.expires_at,
        username=given.username,
        join_again=given.join_again,
    )
