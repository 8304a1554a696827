"""How a peer proves to the authority that its libp2p key is its own: a signature over what it asks, and when."""

from __future__ import annotations

import base64
import binascii
import hashlib

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

# as hivemind.utils.crypto.RSAPrivateKey signs
_PSS = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.MAX_LENGTH)


def join_claim(run_id: str, moment: int, hf_token: str) -> bytes:
    """`moment`: s since 1970. The login is in it, so that a proof that is overheard fits no other one."""
    return f"volunteer-kit join\n{run_id}\n{moment}\n{hashlib.sha256(hf_token.encode()).hexdigest()}".encode()


def refresh_claim(run_id: str, moment: int) -> bytes:
    return f"volunteer-kit refresh\n{run_id}\n{moment}".encode()


def convict_claim(run_id: str, moment: int, evidence: str) -> bytes:
    """What was found is in it: a proof that is overheard brings no other evidence."""
    return f"volunteer-kit convict\n{run_id}\n{moment}\n{hashlib.sha256(evidence.encode()).hexdigest()}".encode()


def prove(key: rsa.RSAPrivateKey, claim: bytes) -> str:
    """base64"""
    return base64.b64encode(key.sign(claim, _PSS, hashes.SHA256())).decode()


def is_proven(ssh_public_key: bytes, proof: str, claim: bytes) -> bool:
    """Has the owner of this key signed the claim? False too for what is no RSA key, or no signature."""
    try:
        key = serialization.load_ssh_public_key(ssh_public_key)
        if not isinstance(key, rsa.RSAPublicKey):
            return False
        key.verify(base64.b64decode(proof, validate=True), claim, _PSS, hashes.SHA256())
    except (ValueError, binascii.Error, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def public_text(key: rsa.RSAPrivateKey) -> bytes:
    """ "ssh-rsa ...", as hivemind writes a public key."""
    return key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
