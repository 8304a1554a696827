"""Who may speak for a run: its root key, the keys that the root certifies, and what those sign.

The run file holds the root's public key. The root signs nothing but certificates of online keys, so it may lie in a
drawer; each signed thing carries its certificate, so that an online key can be changed at any time and nobody has to be
told. Ed25519 (RFC 8032) throughout.
"""

from __future__ import annotations

import base64
import binascii
import logging
import shlex
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgpack
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from volunteer_kit.storage import set_aside, write_once, write_whole

VERSION = 1
MAX_ENVELOPE = 65_536  # bytes
MAX_ITEMS = 1024  # of a list in it; pardons are 1000
DAY = 86_400.0  # s
PREFIX = "ed25519:"
NO_KEY = f"{PREFIX}{'A' * 43}"  # in the place of a key that is not made yet
_log = logging.getLogger(__name__)

Role = Literal["authority", "monitor"]  # signs access tokens and ban lists; signs manifests and orders to roll back
Kind = Literal["malformed", "forged", "expired", "other_run", "other_peer"]


class TokenError(ValueError):
    """Something signed that is not to be believed; str() is the reason in words."""

    def __init__(self, kind: Kind, reason: str):
        super().__init__(reason)
        self.kind = kind


class KeysError(OSError):
    """A run's keys cannot be read, written or used. Its text says what to do."""


@dataclass(frozen=True)
class Certificate:
    """The root's word that a key may sign in a role for a run, until `not_after` (s since 1970)."""

    run_id: str
    role: str
    public_key: bytes  # 32
    not_after: float
    signature: bytes = b""  # the root's

    def claims(self) -> bytes:
        claims = [self.run_id, self.role, self.public_key, self.not_after]
        return b"volunteer-kit certificate\0" + msgpack.packb(claims)

    def to_bytes(self) -> bytes:
        return msgpack.packb([self.run_id, self.role, self.public_key, self.not_after, self.signature])

    @classmethod
    def from_bytes(cls, data: bytes) -> Certificate:
        """Raises TokenError (malformed)."""
        certificate = cls(*unpack(data, (str, str, bytes, float, bytes)))
        if len(certificate.public_key) != 32 or len(certificate.signature) != 64:
            raise TokenError("malformed", "it has no key, or no signature")
        return certificate


@dataclass(frozen=True)
class Trust:
    """What a peer believes of a run: who holds one of these root keys, and whom they certify.

    :param public_keys: 32 bytes each; two while the root is being replaced
    """

    run_id: str
    public_keys: tuple[bytes, ...]

    @classmethod
    def of(cls, run_id: str, public_key_text: str) -> Trust:
        """From a run file's `authority.public_key`. Raises ValueError."""
        return cls(run_id, parse_public_keys(public_key_text))

    def open(self, envelope: bytes, kind: str, role: Role, now: float) -> bytes:
        """The payload of what somebody in `role` signed. `now`: s since 1970. Raises TokenError."""
        if not isinstance(envelope, bytes) or not 0 < len(envelope) <= MAX_ENVELOPE:
            raise TokenError("malformed", "it is no signed statement")
        said, payload, certified, signature = unpack(envelope, (str, bytes, bytes, bytes), version=VERSION)
        certificate = Certificate.from_bytes(certified)
        if certificate.run_id != self.run_id:
            raise TokenError("other_run", f"it is for the run {certificate.run_id[:64]!r}, this is {self.run_id!r}")
        if said != kind or certificate.role != role:
            raise TokenError(
                "forged", f"it is a {said[:32]!r} of the key for {certificate.role[:32]!r}, not a {kind!r}"
            )
        if not any(_verify(key, certificate.signature, certificate.claims()) for key in self.public_keys):
            raise TokenError("forged", "its key is not certified by the run's root key")
        if certificate.not_after < now:
            raise TokenError("expired", "the certificate of its key has expired")
        if not _verify(certificate.public_key, signature, _signed(self.run_id, kind, payload)):
            raise TokenError("forged", "its signature is wrong")
        return payload


@dataclass(frozen=True)
class Signer:
    """An online key and its certificate."""

    certificate: Certificate
    _key: Ed25519PrivateKey = field(repr=False)

    def sign(self, kind: str, payload: bytes) -> bytes:
        """An envelope for Trust.open."""
        signature = self._key.sign(_signed(self.certificate.run_id, kind, payload))
        return msgpack.packb([VERSION, kind, payload, self.certificate.to_bytes(), signature])


class KeyFolder:
    """A run's keys on the host's disk: root.pem with its public root.pub, and per role ROLE.pem with ROLE.cert.
    Readable by their owner only.

    root.pem is needed to make and renew certificates only, and may be kept elsewhere in between.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._told: dict[str, float] = {}  # role -> when its end was last warned of, s since 1970

    def create(self, run_id: str) -> str:
        """Make the root key, if this folder has never had one. :returns: its public text for the run file.

        Goes on without root.pem once root.pub is there. Raises KeysError.
        """
        if self._has("run_id"):
            self._require(run_id)
        elif not self._has_a_run():
            self._clear_empty("root.pem")
        if not self._has("root.pem"):
            if self._has_a_run():
                return self.root_public
            self._write_once("root.pem", _pem(Ed25519PrivateKey.generate()))
        self._write_once("root.pub", public_text(_public(self._root())).encode() + b"\n")
        self._write_once("run_id", run_id.encode())  # last: where it is, a root key has been
        self._require(run_id)
        return self.root_public

    def _has_a_run(self) -> bool:
        """A new root would be another identity, which nobody who has the run file believes."""
        return any(self._has(name) for name in ("run_id", "root.pub")) or any(self.path.glob("*.cert"))

    def _require(self, run_id: str) -> None:
        if self.run_id != run_id:
            raise KeysError(
                f"The keys in {self.path} are of the run {self.run_id!r}, not {run_id!r}: name another folder."
            )

    @property
    def run_id(self) -> str:
        try:
            found = self._read("run_id").decode().strip()
        except UnicodeDecodeError:
            found = ""
        if not found or "\0" in found:
            file = shlex.quote(str(self.path / "run_id"))
            raise KeysError(
                f"{self.path / 'run_id'} is damaged: it says of which run these keys are.\n"
                f"1. Put back its backup, or write the run's name into it: printf NAME > {file}"
            )
        return found

    @property
    def root_public(self) -> str:
        """What belongs into the run file as authority.public_key."""
        if self._has("root.pem") or not self._has("root.pub"):
            return public_text(_public(self._root()))
        return self._kept_public()

    def signer(self, role: Role, lifetime_days: float = 30.0) -> Signer:
        """The role's key with a certificate that holds for a third of its lifetime at least; without root.pem, until
        it ends, with a warning once a day. Raises KeysError."""
        self._clear_empty(f"{role}.pem")
        self._write_once(f"{role}.pem", _pem(Ed25519PrivateKey.generate()))
        key, certificate = self._load(f"{role}.pem"), self._certificate(role)
        fresh = certificate is not None and certificate.public_key == _public(key)
        left = certificate.not_after - time.time() if fresh else 0.0
        if left < lifetime_days * DAY / 3:
            if left <= 0 or self._has("root.pem"):
                certificate = self._certify(role, key, lifetime_days)
            else:
                self._warn(role, left)
        return Signer(certificate, key)

    def running_out(self, lifetime_days: float = 30.0) -> dict[str, float]:
        """Roles whose certificate is in the last third of its lifetime and cannot be renewed, as root.pem is not here
        -> days left (negative: it has ended)."""
        if self._has("root.pem"):
            return {}
        certificates = [self._certificate(path.stem) for path in sorted(self.path.glob("*.cert"))]
        left = {one.role: (one.not_after - time.time()) / DAY for one in certificates if one is not None}
        return {role: days for role, days in left.items() if days < lifetime_days / 3}

    def _warn(self, role: str, left: float) -> None:
        if time.time() - self._told.get(role, float("-inf")) < DAY:
            return
        self._told[role] = time.time()
        _log.warning(
            "The certificate of the run's %s ends in %.0f days, and then volunteers believe it no more. To renew it, "
            "put root.pem back into %s for a minute.", role, left / DAY, self.path,
        )  # fmt: skip

    def rotate(self, role: Role, lifetime_days: float = 30.0) -> Signer:
        """A new key in the role. What the old one signed stays good until it expires: nobody is sent away."""
        key = Ed25519PrivateKey.generate()
        certificate = self._certify(role, key, lifetime_days, write=False)  # without root.pem nothing is changed
        self._write(f"{role}.pem", _pem(key))
        self._write(f"{role}.cert", certificate.to_bytes())
        return Signer(certificate, key)

    def _certify(self, role: Role, key: Ed25519PrivateKey, days: float, write: bool = True) -> Certificate:
        bare = Certificate(self.run_id, role, _public(key), time.time() + days * DAY)
        signature = self._root().sign(bare.claims())
        certificate = Certificate(bare.run_id, bare.role, bare.public_key, bare.not_after, signature)
        if write:
            self._write(f"{role}.cert", certificate.to_bytes())
        return certificate

    def _certificate(self, role: Role) -> Certificate | None:
        try:
            return Certificate.from_bytes((self.path / f"{role}.cert").read_bytes())
        except (OSError, TokenError):
            return None

    def _root(self) -> Ed25519PrivateKey:
        key = self._load("root.pem")
        if self._has("root.pub") and public_text(_public(key)) != self._kept_public():
            raise KeysError(
                f"{self.path / 'root.pem'} is not the root key of this run: root.pub beside it has another one.\n"
                "1. Put back the backup of this run's root.pem."
            )
        return key

    def _kept_public(self) -> str:
        text = self._read("root.pub").decode(errors="replace").strip()
        try:
            parse_public_keys(text)
        except ValueError as error:
            raise KeysError(f"{self.path / 'root.pub'} is damaged: put back its backup, or root.pem.") from error
        return text

    def _has(self, name: str) -> bool:
        return (self.path / name).exists()

    def _clear_empty(self, name: str) -> None:
        """A file that a full disk left: no key was in it that anybody has heard of. Raises KeysError."""
        path = self.path / name
        try:
            if path.is_file() and not path.read_bytes().strip(b"\0\r\n\t "):
                _log.warning("%s was empty; it is kept as %s. A new key is made.", path, set_aside(path))
        except OSError as error:
            raise KeysError(f"The run's key file {path} cannot be read: {error.strerror}.") from error

    def _load(self, name: str) -> Ed25519PrivateKey:
        try:
            key = serialization.load_pem_private_key(self._read(name), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise self._damaged(name, "is damaged") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise self._damaged(name, "is another kind of key")
        return key

    def _damaged(self, name: str, what: str) -> KeysError:
        """A root key is never made anew where one was: it is who the run is."""
        file = shlex.quote(str(self.path / name))
        without = "a new one is made, which root.pem certifies; volunteers notice nothing"
        if name == "root.pem":
            without = "the run goes on until its certificates end; then it needs new keys, and volunteers its new file"
        return KeysError(
            f"The key {self.path / name} {what}: put back its backup.\n"
            f"Without a backup, move it away: {without}.\n  mv {file} {file}.damaged"
        )

    def _read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            raise KeysError(
                f"The run's key file {self.path / name} is missing.\n"
                "1. If it is kept elsewhere or in a backup, put it there.\n"
                "2. Without a backup of root.pem the run needs new keys, and volunteers the new run file."
            ) from None
        except OSError as error:
            raise KeysError(f"The run's key file {self.path / name} cannot be read: {error.strerror}.") from error

    def _write_once(self, name: str, content: bytes) -> None:
        if not (self.path / name).exists():
            self._write(name, content, replace=False)

    def _write(self, name: str, content: bytes, replace: bool = True) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if replace:
                write_whole(self.path / name, content, mode=0o600)
            else:  # of two processes that begin together, the first has made the key
                write_once(self.path / name, content, mode=0o600)
        except OSError as error:
            raise KeysError(
                f"The run's keys cannot be written to {self.path}: {error.strerror}.\n"
                f"1. See how much room is left there: df -h {shlex.quote(str(self.path.absolute().parent))}\n"
                "2. Make room, or name a folder that this user may write to; then the same command once more."
            ) from error


def public_text(public_key: bytes) -> str:
    return PREFIX + base64.urlsafe_b64encode(public_key).decode().rstrip("=")


def parse_public_keys(text: str) -> tuple[bytes, ...]:
    """One or several public keys, blanks between them. Raises ValueError."""
    keys = []
    for word in text.split():
        try:
            key = base64.urlsafe_b64decode(word.removeprefix(PREFIX) + "=")
        except (binascii.Error, ValueError):
            key = b""
        if not word.startswith(PREFIX) or len(key) != 32:
            raise ValueError(f"{word[:80]!r} is no public key: one begins with {PREFIX} and 43 letters follow")
        keys.append(key)
    if not 0 < len(keys) <= 4:
        raise ValueError(f"{len(keys)} public keys; a run has one, and two while its root is being replaced")
    return tuple(keys)


def unpack(data: bytes, types: tuple[type, ...], version: int | None = None) -> Any:
    """A stranger's msgpack list of just these types, `version` before them. Raises TokenError (malformed)."""
    if len(data) > MAX_ENVELOPE:
        raise TokenError("malformed", "it is too long")
    try:
        found = msgpack.unpackb(data, max_array_len=MAX_ITEMS, max_map_len=0, max_ext_len=0)
    except ValueError as error:  # all of msgpack's are
        raise TokenError("malformed", "it cannot be read") from error
    if not isinstance(found, list):
        raise TokenError("malformed", "it cannot be read")
    if version is not None and found[:1] != [version]:
        raise TokenError("malformed", "it is of another version of the kit")
    found = found[version is not None :]
    if len(found) != len(types) or any(type(one) is not kind for one, kind in zip(found, types, strict=True)):
        raise TokenError("malformed", "it has other parts than it should")
    return found


def _signed(run_id: str, kind: str, payload: bytes) -> bytes:
    return b"volunteer-kit statement\0" + msgpack.packb([run_id, kind, payload])


def _verify(public_key: bytes, signature: bytes, message: bytes) -> bool:
    try:
        _verify_once(public_key, signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=4096)  # a token is shown with each call
def _verify_once(public_key: bytes, signature: bytes, message: bytes) -> None:
    """Raises InvalidSignature or ValueError, and then nothing is kept: forged messages of 64 kB would fill 268 MB."""
    Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)


def _public(key: Ed25519PrivateKey) -> bytes:
    raw = serialization.Encoding.Raw, serialization.PublicFormat.Raw
    return key.public_key().public_bytes(*raw)


def _pem(key: Ed25519PrivateKey) -> bytes:
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(*pem)
