"""Make node keys, which sign statements, and credentials, by which a libp2p key vouches for a node key.

A node key is an Ed25519 key (RFC 8032), whose signatures have 64 bytes where those of a libp2p key (RSA) have 256. A
credential is the libp2p public key, the node's public key, and the former's signature under the latter for one run.
"""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from typing import Final, NamedTuple

import msgpack
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from volunteer_kit.swarm.net.identity import EXPONENT, KEY_BITS
from volunteer_kit.swarm.node.statements import BadSignature
from volunteer_kit.swarm.wire import WireError, decode, encode

NODE_KEY: Final = 32  # bytes of an Ed25519 public key
SIGNATURE: Final = 64  # bytes of an Ed25519 signature
KEYS_KEPT: Final = 4096  # whose peer ids are remembered; about 2 MB
LONGEST_KEY: Final = 1100  # bytes of an RSA key's DER
LONGEST_RSA_SIGNATURE: Final = 1024  # bytes; a key of 8192 bits has as many
LONGEST_CREDENTIAL: Final = LONGEST_KEY + NODE_KEY + LONGEST_RSA_SIGNATURE + 16  # bytes


@lru_cache(maxsize=KEYS_KEPT)
def peer_id_of(key: bytes) -> str:
    """The libp2p peer id, in base58, of a public key in DER.

    Source: libp2p peer id specification (SHA-256 multihash of the protobuf-encoded public key).
    """
    message = crypto_pb2.PublicKey(key_type=crypto_pb2.KeyType.RSA, data=key)
    return str(PeerID(b"\x12\x20" + hashlib.sha256(message.SerializeToString()).digest()).to_base58())


def public_der(key: RSAPrivateKey) -> bytes:
    """The public key as it travels, in DER."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(key._private_key.public_key().public_bytes(serialization.Encoding.DER, form))


def node_key_of(key: RSAPrivateKey, run_key: str) -> Ed25519PrivateKey:
    """The node key of a peer in one run: HKDF-SHA256 (RFC 5869) of its libp2p key. A peer with a second one is taken
    for a liar, so this must never change.

    :param key: the peer's libp2p key
    """
    info = b"volunteer-kit node key\0" + run_key.encode()
    seed = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=info).derive(key.to_bytes())
    return Ed25519PrivateKey.from_private_bytes(seed)


class Credential(NamedTuple):
    """A claim that a libp2p key vouches for a node key; `certified` checks it."""

    key: bytes  # RSA, DER
    node_key: bytes  # Ed25519
    signature: bytes  # of the RSA key

    @property
    def peer(self) -> str:
        """The peer that the node key is said to belong to, by its id in base58."""
        return peer_id_of(self.key)


class NodeKey(NamedTuple):
    """A node key that its peer's libp2p key vouches for."""

    peer: str
    public: Ed25519PublicKey
    node_key: bytes  # its bytes
    credential: bytes  # as it travels

    def holds(self, message: bytes, signature: bytes) -> bool:
        """Return whether the signature is this key's."""
        if len(signature) != SIGNATURE:
            return False
        try:
            self.public.verify(signature, message)
        except InvalidSignature:
            return False
        return True


def make_credential(key: RSAPrivateKey, node_key: Ed25519PrivateKey, run_key: str) -> bytes:
    """The credential of a node key, as it travels.

    :param key: the peer's libp2p key
    """
    public = node_key.public_key().public_bytes_raw()
    signature = base64.b64decode(key.sign(_certified_bytes(run_key, public)))
    return encode(Credential(public_der(key), public, signature))


def read_credential(data: bytes) -> Credential:
    """Read a credential; `certified` checks whether it holds.

    :raises BadSignature: if it is none
    """
    try:
        credential: Credential = decode(Credential, data, LONGEST_CREDENTIAL)
    except WireError as error:
        raise BadSignature(f"a key that cannot be read: {error}") from error
    if not len(credential.key) <= LONGEST_KEY or len(credential.node_key) != NODE_KEY:
        raise BadSignature("a key of a size that no key has")
    return credential


def certified(credential: Credential, run_key: str) -> NodeKey:
    """The node key that the credential vouches for.

    :raises BadSignature: if it does not hold in this run
    """
    peer = credential.peer
    message = _certified_bytes(run_key, credential.node_key)
    if not _load(credential.key).verify(message, base64.b64encode(credential.signature)):
        raise BadSignature(f"the key of {peer} is not certified for this run")
    public = Ed25519PublicKey.from_public_bytes(credential.node_key)
    return NodeKey(peer, public, credential.node_key, encode(credential))


def _certified_bytes(run_key: str, node_key: bytes) -> bytes:
    packed: bytes = msgpack.packb(("node key", run_key, node_key))
    return b"volunteer-kit node credential\0" + packed


def _load(key: bytes) -> RSAPublicKey:
    try:
        found = serialization.load_der_public_key(key)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadSignature("a key that cannot be read") from error
    if not isinstance(found, rsa.RSAPublicKey) or found.key_size not in KEY_BITS:
        raise BadSignature("a key that is no RSA key of 2048 to 8192 bits")
    if found.public_numbers().e != EXPONENT:  # a long one makes each check take 9 ms
        raise BadSignature("a key with another exponent")
    return RSAPublicKey(found)
