"""The run's authority: tokens, lists and certificates that it signs, requests to it, and its answers."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
from cryptography.hazmat.primitives.asymmetric import rsa
from pydantic import BaseModel, ValidationError

from tests.fuzz.forms import JSON, MSGPACK, Text
from tests.fuzz.frozen_clock import NOW
from tests.fuzz.target import Registry
from tests.fuzz.targets.common import MEMBERS, run_keys, signer
from volunteer_kit.auth.access_token import (
    AccessToken,
    BanList,
    account_digest,
    issue_token,
    key_hash,
    peer_id_of_key,
    read_bans_statement,
    read_pardons,
    read_token,
    sign_bans,
    sign_pardons,
)
from volunteer_kit.auth.authority.hub_login import OAuthToken
from volunteer_kit.auth.authority.wire import BanThem, Convict, Join, Named, Proven, SignIn
from volunteer_kit.auth.authority_client import AuthorityClient
from volunteer_kit.auth.authorizer import Authorizer
from volunteer_kit.auth.evidence import Evidence, reason_of
from volunteer_kit.auth.identity import LoginError, tidy
from volunteer_kit.auth.keys import Certificate, TokenError, Trust
from volunteer_kit.auth.proof import is_proven, prove, public_text

registry = Registry()
PEER = MEMBERS[1].to_bytes()
BANS = BanList(3, frozenset({account_digest("test", "mallory")}), {account_digest("test", "ada"): NOW})


@functools.lru_cache(maxsize=1)
def _key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def _token() -> bytes:
    return issue_token(signer("authority"), AccessToken("ada", PEER, b"k" * 32, "test", "volunteer", NOW + 600))


def _envelopes() -> list[bytes]:
    return [_token(), sign_bans(signer("authority"), BANS, NOW, NOW + 120), sign_pardons(signer("authority"), BANS)]


def _read_as_any(envelope: bytes) -> bool:
    trust = run_keys().trust
    for read in (
        lambda: read_token(envelope, trust, NOW),
        lambda: read_bans_statement(envelope, trust, NOW),
        lambda: read_pardons(envelope, trust, 3, NOW),
    ):
        try:
            return read() is not None
        except TokenError as refused:
            last = refused
    raise last


@registry.add(_envelopes, TokenError, form=MSGPACK)
def access_token(data: bytes) -> bool:
    """A token, a list's statement or pardons, by anybody."""
    return _read_as_any(data)


def _contents() -> Iterator[bytes]:
    for envelope in _envelopes():
        yield msgpack.unpackb(envelope)[2]


@registry.add(_contents, TokenError, form=MSGPACK)
def signed_token(data: bytes) -> bool:
    """The same where the authority's key has signed the content."""
    for kind in ("bans", "pardons", "token"):
        try:
            return _read_as_any(signer("authority").sign(kind, data))
        except TokenError as refused:
            last = refused
    raise last


@registry.add(lambda: [signer("authority").certificate.to_bytes()], TokenError, form=MSGPACK)
def certificate(data: bytes) -> bool:
    """A certificate of an online key."""
    return len(Certificate.from_bytes(data).claims()) > 0


@registry.add(lambda: [run_keys().public_key.encode()], ValueError, form=Text("vk1-", " ", "=", "A" * 43, "é"))
def root_key(data: bytes) -> bool:
    """A run file's public key."""
    return bool(Trust.of("test", data.decode("utf-8", "replace")).public_keys)


def _public_keys() -> Iterator[bytes]:
    yield public_text(_key())
    yield b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDCy6s8cq2vmgKsuXx2LHqXKxKTXnG1ycz5RTTVWqDf1"


@registry.add(_public_keys, ValueError, form=Text("ssh-rsa ", "ssh-dss ", "AAAA", "=", " a@b", "\n"))
def public_key(data: bytes) -> bool:
    """A peer's key, and the proof that it is its own."""
    is_proven(data, prove(_key(), b"claim"), b"claim")
    is_proven(public_text(_key()), data.decode("latin-1"), b"claim")
    return len(peer_id_of_key(data) + key_hash(data)) == 66


def _evidence() -> str:
    finding = {
        "cause": "gradient", "epoch": 3, "round": "0" * 16, "jurors_for": 3, "jurors_against": 0, "group_size": 5,
        "details": "its gradient is not the one of its samples",
    }  # fmt: skip
    return json.dumps(
        {
            "accused": PEER.hex(), "others": 4, "findings": [finding, {**finding, "epoch": 4}],
            "signatures": [{"peer_id": MEMBERS[2].to_bytes().hex(), "findings": [0, 1], "at": NOW}],
        }
    )  # fmt: skip


@registry.add(lambda: [_evidence().encode()], ValidationError, form=JSON)
def evidence(data: bytes) -> bool:
    """A monitor's evidence of a conviction, as the authority keeps and tells it."""
    found = Evidence.model_validate_json(data)
    found.to_text()
    return len(reason_of(found, 3)) > 0


def _proven() -> dict[str, Any]:
    return {"run_id": "test", "public_key": public_text(_key()).decode(), "time": 1, "proof": prove(_key(), b"claim")}


def _request(model: type[BaseModel], seed: Callable[[], dict[str, Any]]) -> None:
    def decode(data: bytes) -> bool:
        return model.model_validate_json(data) is not None

    registry.add(
        lambda: [json.dumps(seed()).encode()], ValidationError, name=f"request_{model.__name__.lower()}", form=JSON
    )(decode)


_request(Join, lambda: {**_proven(), "hf_token": "hf_abc", "scope": "openid profile"})
_request(Proven, _proven)
_request(Convict, lambda: {**_proven(), "token": base64.b64encode(_token()).decode(), "evidence": "{}", "votes": 3})
_request(SignIn, lambda: {"hf_token": "hf_abc"})
_request(Named, lambda: {"username": "ada"})
_request(BanThem, lambda: {"username": "ada", "reason": "sends noise"})


def _jwt(claims: str) -> bytes:
    return f"hf_oauth_e30.{base64.urlsafe_b64encode(claims.encode()).decode().rstrip('=')}.sig".encode()


@registry.add(
    lambda: [_jwt('{"scope": "openid profile", "client_id": "app"}'), _jwt('{"scope": ["openid"], "oauthApp": "a"}')],
    form=Text("hf_oauth_", ".", "e30", "W10", "=", "eyJzY29wZSI6W119"),
)
def hub_login(data: bytes) -> bool:
    """What an OAuth token says of itself."""
    return OAuthToken.read(data.decode("utf-8", "replace")) is not None


@registry.add(lambda: [b" hf_abc \n", b'"hf_abc"'], LoginError)
def login_token(data: bytes) -> bool:
    """What a person pastes as a token."""
    return bool(tidy(data.decode("utf-8", "replace")))


class _Answering(AuthorityClient):
    """A client whose every question has one answer."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer

    def get(self, path: str, session: str | None = None, **query: Any) -> dict[str, Any]:
        return self.answer

    def post(self, path: str, body: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        return self.answer


def _answers() -> Iterator[bytes]:
    statement = base64.b64encode(sign_bans(signer("authority"), BANS, NOW, NOW + 120)).decode()
    accounts = [account.hex() for account in BANS.accounts]
    yield json.dumps({"version": 3, "accounts": accounts, "statement": statement}).encode()
    pardons = base64.b64encode(sign_pardons(signer("authority"), BANS)).decode()
    yield json.dumps({"version": 3, "accounts": accounts, "statement": statement, "pardons": pardons}).encode()
    yield json.dumps({"token": base64.b64encode(_token()).decode(), "expires_at": NOW, "username": "ada"}).encode()


@registry.add(_answers, LoginError, form=JSON, max_bytes=8192)
def authority_answer(data: bytes) -> bool:
    """What an authority answers to a peer that joins, refreshes, or asks for the bans."""
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        return False
    if not isinstance(answer, dict):
        return False
    asking = Authorizer("https://authority.test", run_keys().trust, "test", _key(), "hf_abc", clock=lambda: NOW)
    asking._client = _Answering(answer)
    asking._peer_id = PEER
    if "token" in answer:
        return asking.refresh() is not None
    return asking.bans() is not None
