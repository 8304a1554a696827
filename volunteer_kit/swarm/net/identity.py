"""Make and load a peer's libp2p key, which signs its records, and tell the peer of a signed record."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey
from hivemind.utils.logging import get_logger

from volunteer_kit.auth.access_token import PEER_ID_BYTES, peer_id_of_key
from volunteer_kit.storage import set_aside, write_once
from volunteer_kit.swarm.errors import SwarmError

logger = get_logger(__name__)

KEY_BITS = range(2048, 8192 + 1)  # of RSA keys; p2pd takes no others
EXPONENT = 65537  # of RSA keys, as p2pd, OpenSSH and hivemind make them
PEER_DIGEST_SIZE = 8  # bytes


def peer_digest(peer_id: PeerID) -> bytes:
    """Return the digest that stands for a peer where few bytes are to be had: in the ledger of credit.

    To make a peer id with another's digest takes 2^64 RSA keys.
    """
    return hashlib.blake2b(peer_id.to_bytes(), digest_size=PEER_DIGEST_SIZE).digest()


def load_private_key(identity: bytes) -> RSAPrivateKey:
    """The libp2p identity file's key, as the key that signs records."""
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    der = crypto_pb2.PrivateKey.FromString(identity).data
    key._private_key = serialization.load_der_private_key(der, password=None)
    return key


def ensure_identity(
    identity_path: str | Path, warn: Callable[[str], None] = logger.warning, may_be_new: bool = True
) -> rsa.RSAPrivateKey:
    """The key in this file, which is made if it is missing. So is one in the place of an empty file, which a full disk
    leaves: no key was ever in it, or none is left. Another file that is no key stays, for it may be one, damaged.

    :param warn: told in words of an empty file
    :param may_be_new: False: others know the key that was in it, so an empty file is an error too
    Raises SwarmError (identity).
    """
    path = Path(identity_path)
    try:
        if may_be_new and path.is_file() and not path.read_bytes().strip(b"\0\r\n\t "):
            warn(f"{path} was empty, as a full disk leaves it; it is kept as {set_aside(path)}. A new key is made.")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            key = crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.RSA, data=RSAPrivateKey().to_bytes())
            write_once(path, key.SerializeToString(), mode=0o400)
    except OSError as e:
        place = shlex.quote(str(path.parent))
        raise SwarmError(
            f"This machine's key cannot be kept in {path} ({e.strerror or e}).\n"
            f"1. Make room, or see who may write there: df -h {place}; ls -ld {place}\n"
            "2. Or name a folder on another disk.",
            kind="identity",
        ) from e
    try:
        return load_private_key(path.read_bytes())._private_key
    except Exception as e:
        file = shlex.quote(str(path))
        raise SwarmError(
            f"The identity file {path} cannot be read ({e!r}).\n"
            f"1. If you have a backup of it, put it back: it keeps this machine's peer id.\n"
            f"2. Otherwise move it away, and a new one is made: mv {file} {file}.damaged",
            kind="identity",
        ) from e


def give_up_key(identity_path: str | Path) -> Path | None:
    """Another machine has this key: keep the file beside, so that the next start makes a new one. :returns: where it
    is; None if it cannot be moved, and nothing changes."""
    path = Path(identity_path)
    for number in range(1, 100):
        place = path.with_name(f"{path.name}.shared" + (f"-{number}" if number > 1 else ""))
        if not place.exists():
            try:
                path.rename(place)
            except OSError:
                return None
            return place
    return None


def is_peer_id(name: object) -> bool:
    """Of an RSA key, as all of ours are: a SHA-256 multihash."""
    return isinstance(name, bytes) and len(name) == PEER_ID_BYTES and name[:2] == b"\x12\x20"


@lru_cache(maxsize=10_000)
def peer_id_of_owner(subkey: bytes) -> PeerID | None:
    """A signed record's subkey "[owner:ssh-rsa ...]" -> the libp2p peer id of that key; None for anything else.

    hivemind takes whatever has that somewhere in it; with a letter before it, or a comment behind the key, one peer
    would have any number of records and count as so many.
    """
    before, after = RSASignatureValidator.PUBLIC_KEY_FORMAT.split(b"_key_")
    text = subkey.removeprefix(before).removesuffix(after)
    try:
        key = serialization.load_ssh_public_key(text)
        if not isinstance(key, rsa.RSAPublicKey) or not _is_quick(key):
            return None
        is_canonical = subkey == before + RSAPublicKey(key).to_bytes() + after
        return PeerID(peer_id_of_key(text)) if is_canonical else None
    except (ValueError, UnsupportedAlgorithm):
        return None


def _is_quick(key: rsa.RSAPublicKey) -> bool:
    """Does a look at one of its signatures take well under a millisecond? A long exponent makes it 9 ms."""
    return key.key_size in KEY_BITS and key.public_numbers().e == EXPONENT
