"""Who leaves its groups waiting is let into none for a while; a line that breaks now and then is."""

from __future__ import annotations

from hivemind.p2p import PeerID

from volunteer_kit.swarm.kept_waiting import REFUSED_FOR, REMEMBERED_FOR, KeptWaiting

A, B = PeerID(b"a"), PeerID(b"b")


def test_who_is_silent_again_and_again_is_refused_for_a_while():
    now = [0.0]
    kept = KeptWaiting(lambda: now[0])
    kept.note([A]), kept.note([A])
    assert not kept.is_refused(A), "lines break"
    kept.note([A, B])
    assert kept.is_refused(A) and not kept.is_refused(B)
    now[0] += REFUSED_FOR
    assert not kept.is_refused(A)
    kept.note([A])
    assert kept.is_refused(A), "it has not got better"


def test_what_was_long_ago_is_forgotten():
    now = [0.0]
    kept = KeptWaiting(lambda: now[0])
    for _ in range(10):
        kept.note([A])
        now[0] += REMEMBERED_FOR / 2
    assert not kept.is_refused(A)
    kept.note([])
    now[0] += REMEMBERED_FOR
    kept.note([B])
    assert set(kept._times) == {B}
