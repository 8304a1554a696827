"""Strikes, evidence and a monitor's reports for tests."""

from __future__ import annotations

import base64
import time
from typing import Any

from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.p2p import PeerID

from tests.local_authority import RUN, Authority, key
from volunteer_kit.auth.access_token import AccessToken, issue_token, key_hash, peer_id_of_key
from volunteer_kit.auth.proof import convict_claim, prove, public_text
from volunteer_kit.swarm.verification.convictions import Strike, evidence_of

DETAILS = "step 41: 256 samples were computed again; what was sent differs by 1.97 of its length, 0.15 is allowed"


def strike_of(peer: PeerID, **changes: Any) -> Strike:
    values = dict(
        accused=peer.to_bytes(), epoch=41, round=b"a round!", cause="gradient", jurors_for=4, jurors_against=1,
        group_size=6, details=DETAILS, at=time.time(),
    )  # fmt: skip
    return Strike(**{**values, **changes})


def peer_of(number: int) -> PeerID:
    """Of tests.local_authority.key."""
    return PeerID(peer_id_of_key(public_text(key(number))))


def token_of(authority: Authority, identity: rsa.RSAPrivateKey, role: str = "monitor", seconds: float = 600.0) -> str:
    public = public_text(identity)
    expires = time.time() + seconds
    token = AccessToken(f"({role})", peer_id_of_key(public), key_hash(public), RUN, role, expires)
    return base64.b64encode(issue_token(authority.keys.signer("authority"), token)).decode()


def evidence_by(signers: list[int], accused: int = 0, others: int = 3, **changes: Any) -> str:
    """JSON: the peers with these numbers convict another."""
    strikes = [strike_of(peer_of(accused), **changes)]
    return evidence_of(peer_of(accused), {peer_of(number): strikes for number in signers}, others).to_text()


def report_body(authority: Authority, evidence: str, monitor: int = 9, at: float | None = None, **changes: Any) -> dict:
    """What the monitor with this key sends."""
    moment = int(time.time() if at is None else at)
    body = {
        "run_id": RUN, "public_key": public_text(key(monitor)).decode(), "time": moment,
        "proof": prove(key(monitor), convict_claim(RUN, moment, evidence)), "evidence": evidence, "votes": 3,
        "token": token_of(authority, key(monitor)),
    }  # fmt: skip
    return {**body, **changes}
