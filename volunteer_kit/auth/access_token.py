"""What the authority signs: that a peer may take part for some minutes, and who may not.

An access token binds an account of the Hub to one libp2p key, peer id and run. It travels with the calls that a peer
makes; shown by any other peer it is worth nothing, for libp2p proves whose call it is.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgpack
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from volunteer_kit.auth.keys import (
    KeyFolder,
    KeysError,
    Role,
    Signer,
    TokenError,
    Trust,
    unpack,
)

__all__ = [
    "AccessToken", "BanList", "BansStatement", "KeyFolder", "KeysError", "Role", "Signer", "TokenError", "Trust",
    "account_digest", "issue_token", "key_hash", "peer_id_of_key", "read_bans_statement", "read_pardons", "read_token",
    "sign_bans", "sign_pardons",
]  # fmt: skip

MAX_LIFETIME = 900.0  # s; of a token
SKEW = 5.0  # s; hivemind's nodes let clocks differ by 3
ROLES = ("volunteer", "monitor", "host")  # of a peer: trains; watches and judges; is the first address
MAX_NAME = 100  # characters; the Hub's names have 42 at most
PEER_ID_BYTES = 34
MAX_BANS = 65_536
MAX_PARDONS = 1000  # the newest; a pardon is of use for as long as what it sets aside would count


@dataclass(frozen=True)
class AccessToken:
    """What a token says. `expires_at`: s since 1970; `key_hash`: SHA-256 of the peer's public key (DER)."""

    username: str
    peer_id: bytes
    key_hash: bytes
    run_id: str
    role: str
    expires_at: float

    @property
    def account(self) -> bytes:
        return account_digest(self.run_id, self.username)


def issue_token(signer: Signer, token: AccessToken) -> bytes:
    """An envelope of under 600 bytes. Raises ValueError for what no peer would accept."""
    if token.run_id != signer.certificate.run_id:
        raise ValueError(f"a token for {token.run_id!r} by the key of {signer.certificate.run_id!r}")
    _check(token)
    payload = [token.username, token.peer_id, token.key_hash, token.role, float(token.expires_at)]
    return signer.sign("token", msgpack.packb(payload))


def read_token(envelope: bytes, trust: Trust, now: float, skew: float = SKEW) -> AccessToken:
    """What a stranger shows. `now`: s since 1970. Raises TokenError (malformed, forged, expired, other_run)."""
    payload = trust.open(envelope, "token", "authority", now - skew)
    username, peer_id, key, role, expires_at = unpack(payload, (str, bytes, bytes, str, float))
    token = AccessToken(username, peer_id, key, trust.run_id, role, expires_at)
    try:
        _check(token)
    except ValueError as error:
        raise TokenError("malformed", str(error)) from None
    if token.expires_at < now - skew:
        raise TokenError("expired", f"it has expired {now - token.expires_at:.0f} s ago")
    if token.expires_at > now + MAX_LIFETIME + 60:  # s; our own clock may be behind
        raise TokenError("malformed", "it lives longer than any token may")
    return token


def _check(token: AccessToken) -> None:
    if not 0 < len(token.username) <= MAX_NAME or not token.username.isprintable():
        raise ValueError("a token without a name that can be printed")
    if len(token.peer_id) != PEER_ID_BYTES or len(token.key_hash) != 32:
        raise ValueError("a token for something that is no peer")
    if token.role not in ROLES or not math.isfinite(token.expires_at):
        raise ValueError("a token for another role, or without an end")


# --- who a key is ---


def peer_id_of_key(ssh_public_key: bytes) -> bytes:
    """The libp2p peer id of an RSA key, "ssh-rsa ...": 34 bytes. Raises ValueError for anything else.

    Source: libp2p peer id specification (SHA-256 multihash of the protobuf-encoded public key).
    """
    der = _der(ssh_public_key)
    # the protobuf of two fields: Type = RSA (0), Data = der
    length, encoded = len(der), b""
    while length > 127:
        encoded, length = encoded + bytes([length & 127 | 128]), length >> 7
    message = b"\x08\x00\x12" + encoded + bytes([length]) + der
    return b"\x12\x20" + hashlib.sha256(message).digest()


def key_hash(ssh_public_key: bytes) -> bytes:
    """SHA-256 of the key's DER. Raises ValueError."""
    return hashlib.sha256(_der(ssh_public_key)).digest()


def _der(ssh_public_key: bytes) -> bytes:
    try:
        key = serialization.load_ssh_public_key(ssh_public_key)
    except UnsupportedAlgorithm as error:
        raise ValueError("a key of a kind that is not supported") from error
    if not isinstance(key, rsa.RSAPublicKey) or not 2048 <= key.key_size <= 8192:
        raise ValueError("not an RSA key of 2048 to 8192 bits")
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def account_digest(run_id: str, username: str) -> bytes:
    """How lists that everybody may read name an account: 16 bytes."""
    return hashlib.blake2b(f"{run_id}\0{username.lower()}".encode(), digest_size=16).digest()


# --- who may not ---


@dataclass(frozen=True)
class BanList:
    """All accounts that are banned, by digest; `version` grows with each change.

    :ivar pardons: account -> s since 1970 at which a moderator has let it in again: what the swarm has found against it
        until then is set aside. With a signature of their own, so that kits which do not know of them read the list
    """

    version: int = 0
    accounts: frozenset[bytes] = frozenset()
    pardons: Mapping[bytes, float] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, version: int, accounts: Iterable[bytes], pardons: Mapping[bytes, float] | None = None) -> BanList:
        """From a stranger. Raises ValueError."""
        found = frozenset(accounts)
        if len(found) > MAX_BANS or any(not isinstance(one, bytes) or len(one) != 16 for one in found):
            raise ValueError("no list of accounts")
        return cls(version, found, pardons or {})

    @property
    def root(self) -> bytes:
        """Of what is signed: BLAKE2b-256 of the digests in order."""
        return hashlib.blake2b(b"".join(sorted(self.accounts)), digest_size=32).digest()

    def matches(self, statement: BansStatement) -> bool:
        """Is this the list that the authority signed?"""
        return (self.version, len(self.accounts), self.root) == (statement.version, statement.count, statement.root)


@dataclass(frozen=True)
class BansStatement:
    """The authority's word which list is the one, good until `expires_at` (s since 1970)."""

    version: int
    root: bytes
    count: int
    issued_at: float
    expires_at: float


def sign_bans(signer: Signer, bans: BanList, issued_at: float, expires_at: float) -> bytes:
    """An envelope of a few hundred bytes, small enough for the DHT, whatever the list's size."""
    payload = [bans.version, bans.root, len(bans.accounts), float(issued_at), float(expires_at)]
    return signer.sign("bans", msgpack.packb(payload))


def read_bans_statement(envelope: bytes, trust: Trust, now: float, skew: float = SKEW) -> BansStatement:
    """Raises TokenError (malformed, forged, expired, other_run)."""
    payload = trust.open(envelope, "bans", "authority", now - skew)
    statement = BansStatement(*unpack(payload, (int, bytes, int, float, float)))
    if not 0 <= statement.version < 2**53 or not 0 <= statement.count <= MAX_BANS or len(statement.root) != 32:
        raise TokenError("malformed", "it has other parts than it should")
    if not statement.expires_at >= now - skew:
        raise TokenError("expired", "it has expired")
    return statement


def sign_pardons(signer: Signer, bans: BanList) -> bytes:
    """An envelope with the list's version and its MAX_PARDONS newest pardons in it, 45 KB at most."""
    newest = sorted(bans.pardons.items(), key=lambda pardon: -pardon[1])[:MAX_PARDONS]
    return signer.sign("pardons", msgpack.packb([bans.version, [[account, float(at)] for account, at in newest]]))


def read_pardons(envelope: bytes, trust: Trust, version: int, now: float) -> dict[bytes, float]:
    """Of the list of this version. Raises TokenError (malformed, forged, other_run)."""
    said, pardons = unpack(trust.open(envelope, "pardons", "authority", now - SKEW), (int, list))
    if said != version or len(pardons) > MAX_PARDONS or not all(_is_pardon(one) for one in pardons):
        raise TokenError("malformed", "it has other parts than it should")
    return dict(pardons)


def _is_pardon(words: object) -> bool:
    if not isinstance(words, list) or [type(word) for word in words] != [bytes, float]:
        return False
    return len(words[0]) == 16 and math.isfinite(words[1])
