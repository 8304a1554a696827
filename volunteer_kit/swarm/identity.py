"""A peer's libp2p key: what it signs its records with, and whose a signed record is."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import P2P, PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from volunteer_kit.auth.access_token import PEER_ID_BYTES, peer_id_of_key
from volunteer_kit.swarm.errors import SwarmError


def load_private_key(identity: bytes) -> RSAPrivateKey:
    """The libp2p identity file's key, as the key that signs records."""
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    der = crypto_pb2.PrivateKey.FromString(identity).data
    key._private_key = serialization.load_der_private_key(der, password=None)
    return key


def ensure_identity(identity_path: str | Path) -> rsa.RSAPrivateKey:
    """The key in this file, which is made if it is missing. Raises SwarmError (identity)."""
    path = Path(identity_path)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        P2P.generate_identity(str(path))
    try:
        return load_private_key(path.read_bytes())._private_key
    except Exception as e:
        raise SwarmError(
            f"The identity file {identity_path} cannot be read ({e!r}).\n"
            f"1. If you have a backup of it, put it back: it keeps this machine's peer id.\n"
            f"2. Otherwise remove it, and a new one is made: rm {identity_path}",
            kind="identity",
        ) from e


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
    key = subkey.removeprefix(before).removesuffix(after)
    try:
        is_canonical = subkey == before + RSAPublicKey.from_bytes(key).to_bytes() + after
        return PeerID(peer_id_of_key(key)) if is_canonical else None
    except (ValueError, UnsupportedAlgorithm):
        return None
