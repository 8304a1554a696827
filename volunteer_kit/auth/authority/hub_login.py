"""Whose login at the Hub this is; asked by the authority itself, of the Hub itself, with the real client.

Of a login the authority must get none that can act for its owner. A token of a person's settings: the Hub tells its
rights (whoami-v2). A login through an OAuth app: whoami-v2 tells no scope, but the token is "hf_oauth_" and a JSON Web
Token (RFC 7519) that the Hub has signed, with the scope and the app in it. The Hub checks that signature when we ask
whose token it is: what it accepts, it has written itself, so nobody's word about a scope is needed. A token that was
given to another app is refused: its owner said there who he is, not here.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
from dataclasses import dataclass
from typing import Any

from volunteer_kit.auth.identity import MAKE_A_TOKEN, LoginError, check, in_time
from volunteer_kit.auth.moderation import Allowlist, Person, Refused
from volunteer_kit.http_client import http_session

_log = logging.getLogger(__name__)
HARMLESS = {"openid", "profile", "email"}
OAUTH = "hf_oauth_"
AWAY = ("network", "down", "limit", "missing")  # the Hub's trouble or ours, not the volunteer's
_ANOTHER = f"1. {MAKE_A_TOKEN}\n2. Use that one here."


@dataclass(frozen=True)
class OAuthToken:
    """What an OAuth token says of itself."""

    scope: frozenset[str]
    app: str

    @classmethod
    def read(cls, token: str) -> OAuthToken | None:
        """None for a token of another kind, or that cannot be read."""
        parts = token.removeprefix(OAUTH).split(".")
        if not token.startswith(OAUTH) or len(parts) != 3:
            return None
        try:
            claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
            scope = claims["scope"]
            app = claims.get("client_id") or claims.get("oauthApp")  # its name until 2025
        except (binascii.Error, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        scope = scope.split() if isinstance(scope, str) else scope
        if not isinstance(scope, list) or not all(isinstance(part, str) for part in scope) or not isinstance(app, str):
            return None
        return cls(frozenset(scope), app)


def who_is(token: str, allowlist: Allowlist, client_id: str | None) -> Person:
    """The person. Raises Refused: wrong, expired, malformed, can_write, unknown_rights; down when nobody can tell now.

    `client_id`: of the host's own OAuth app.
    """
    oauth = _require_harmless(token, client_id) if token.startswith(OAUTH) else None
    try:
        identity = check(token, for_authority=True, scope=" ".join(sorted(oauth.scope)) if oauth else None)
    except LoginError as error:
        if error.kind in AWAY:
            _log.warning("No volunteer can be let in: %s", error)  # the host's own trouble, a dead proxy for instance
            what = "The authority cannot ask the Hugging Face Hub just now who you are.\n1. Run it again in a minute."
            raise Refused("down", what, retry_after=30) from None
        raise Refused(error.kind, str(error)) from None
    orgs = identity.orgs
    if oauth and allowlist.organization and not allowlist.has_member(orgs):
        orgs += _organizations(token)
    return Person(identity.name, orgs, identity.hub_id)


def _require_harmless(token: str, client_id: str | None) -> OAuthToken:
    oauth = OAuthToken.read(token)
    if oauth is None:
        what = "It cannot be told what this login may do, and the run's authority must not get one that can write."
        raise Refused("unknown_rights", f"{what}\n{_ANOTHER}")
    if more := oauth.scope - HARMLESS:
        what = f"This login may do more than say who you are ({', '.join(sorted(more))[:100]})."
        raise Refused("can_write", f"{what}\n{_ANOTHER}")
    if client_id is None or oauth.app != client_id:
        raise Refused("unknown_rights", f"This login was given to another app than this run's.\n{_ANOTHER}")
    return oauth


def _organizations(token: str) -> tuple[str, ...]:
    """Those of an OAuth login; whoami-v2 may leave them out, the OpenID userinfo has them."""
    try:
        answer = in_time(lambda: _ask_hub("GET", "/oauth/userinfo", headers={"Authorization": f"Bearer {token}"}))
        listed = answer["orgs"]
        return tuple(str(org["preferred_username"]) for org in listed if org.get("preferred_username"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # all of requests' are OSErrors
        return ()


def exchange_code(code: str, verifier: str, redirect: str, client_id: str) -> str:
    """The token for what the Hub's page sent back (RFC 6749, 4.1.3; RFC 7636: `verifier`). Raises Refused."""
    form = {
        "grant_type": "authorization_code", "code": code, "code_verifier": verifier,
        "redirect_uri": redirect, "client_id": client_id,
    }  # fmt: skip
    try:
        return str(in_time(lambda: _ask_hub("POST", "/oauth/token", data=form))["access_token"])
    except (OSError, ValueError, KeyError, TypeError):
        raise Refused("wrong", "The Hub did not complete the sign-in.\n1. Try it again.") from None


def _ask_hub(method: str, path: str, **arguments: Any) -> Any:
    """JSON. Raises OSError, ValueError. No redirect is followed: it could lead the token elsewhere."""
    url = endpoint() + path
    with http_session() as http, http.request(method, url, timeout=10, allow_redirects=False, **arguments) as answer:
        if answer.status_code != 200:
            raise OSError(f"the Hub answered {answer.status_code}")
        return answer.json()


def endpoint() -> str:
    """The Hub's address."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)
