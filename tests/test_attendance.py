"""Whom a group waits for: those who speak, and came when they spoke before."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
from hivemind.p2p import PeerID

from volunteer_kit.swarm.attendance import ABSENCES, MAX_PEERS, SILENT, TIMES_THE_GAP, Attendance
from volunteer_kit.swarm.averager import SwarmAverager
from volunteer_kit.swarm.peer import PeerConfig, start_peer

A, B, C, D = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 5))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def attendance(clock) -> Attendance:
    return Attendance(clock)


def speaks(attendance: Attendance, clock: Clock, peer: PeerID, every: float, times: int, start: float = 0.0) -> None:
    """The others look at the DHT twice as often, and find the same word then."""
    for number in range(times):
        for _ in range(2):
            attendance.heard(peer, start + number)
            clock.now += every / 2
    clock.now -= every / 2


@pytest.mark.parametrize("every, silence", [(0.25, SILENT), (1.0, SILENT), (30.0, TIMES_THE_GAP * 30.0)])
def test_who_is_silent_for_longer_than_it_ever_was_is_gone(attendance, clock, every, silence):
    assert not attendance.is_awaited(A), "nobody has heard of it"
    speaks(attendance, clock, A, every, times=6)
    heard = clock.now - every / 2
    clock.now = heard + silence
    assert attendance.is_awaited(A)
    clock.now += 0.1
    assert not attendance.is_awaited(A)
    attendance.heard(A, 6)
    assert attendance.is_awaited(A)


def test_a_record_that_says_it_is_of_tomorrow_is_as_old_as_we_know_it(attendance, clock):
    attendance.heard(A, told=1e12)
    clock.now += SILENT + 0.1
    attendance.heard(A, told=1e12)
    assert not attendance.is_awaited(A)


def test_who_speaks_and_does_not_come_is_no_longer_awaited_until_it_comes(attendance, clock):
    for peer in (A, B, C):
        attendance.heard(peer, 0)
    for _ in range(ABSENCES - 1):
        attendance.met({A, B, D}, awaited={A, B, C})
    assert attendance.is_awaited(C)
    attendance.met({A, B}, awaited={A, B, C})
    assert not attendance.is_awaited(C) and attendance.is_awaited(A)
    attendance.met({A, C}, awaited={A, B})
    assert attendance.is_awaited(C)


def test_who_speaks_on_and_does_not_come_is_awaited_ever_more_rarely(attendance, clock):
    """Where one round follows the other at once, who is late for one is late for each that does not wait for it."""
    attendance.heard(A, 0)
    waits = []
    for number in range(40):
        attendance.heard(C, number)
        if attendance.is_awaited(C):
            waits.append(number)
        attendance.met({A}, awaited={A, C} if attendance.is_awaited(C) else {A})
    assert waits == [0, 1, 2, 4, 8, 16, 32]
    clock.now += SILENT + 0.1
    for _ in range(24):  # gone, in which time no rounds of its are counted
        attendance.met({A}, awaited={A})
    attendance.heard(C, 40)
    for number in range(41, 65):
        attendance.heard(C, number)
        attendance.met({A}, awaited={A})
    assert attendance.is_awaited(C)


def test_who_has_come_lately_is_a_regular_whether_it_is_heard_or_not(attendance, clock):
    """Who is cut off from most of them knows by that that they go on elsewhere; who never came keeps nobody waiting."""
    for peer in (A, B, C):
        attendance.heard(peer, 0)
    assert not any(map(attendance.is_regular, (A, B, C, D)))
    attendance.met({A, B}, awaited={A, B, C})
    clock.now += 10 * SILENT
    assert attendance.is_regular(B) and not attendance.is_awaited(B) and not attendance.is_regular(C)
    for _ in range(ABSENCES):
        attendance.met({A, C}, awaited={A, B, C})
    assert attendance.is_regular(A) and not attendance.is_regular(B)


def test_where_most_do_not_come_it_is_we_who_are_apart(attendance):
    for peer in (A, B, C):
        attendance.heard(peer, 0)
    for _ in range(ABSENCES):
        attendance.met({A, D}, awaited={A, B, C})
    assert all(map(attendance.is_awaited, (A, B, C)))


def test_whose_record_goes_and_comes_is_no_other_than_before(attendance):
    attendance.heard(A, 0)
    for _ in range(ABSENCES):
        attendance.met({B}, awaited={A, B})
    attendance.heard(B, 1)
    attendance.heard(A, 1)
    assert not attendance.is_awaited(A)


def test_no_more_is_remembered_than_there_is_room_for(attendance):
    peers = [PeerID(b"\x12\x20" + number.to_bytes(32, "big")) for number in range(MAX_PEERS + 1)]
    for peer in peers:
        attendance.heard(peer, 0)
    assert not attendance.is_awaited(peers[0]) and all(map(attendance.is_awaited, peers[1:]))


@pytest.mark.parametrize("awaited, size", [(3, 3), (2, 2)])
def test_a_group_waits_longer_for_who_will_come_than_for_who_may_be_gone(peer, awaited, size):
    """Three are expected; the third begins to look when the time in which groups come together is over."""
    config = PeerConfig(initial_peers=peer.visible_maddrs(), host_maddrs=["/ip4/127.0.0.1/tcp/0"], startup_timeout=60)
    matchmaking_time, late_after = 6.0, 1.25 if awaited == 3 else 1.75
    with contextlib.ExitStack() as ends:
        peers = [peer, *(start_peer(config) for _ in range(2))]
        for other in peers[1:]:
            ends.callback(other.shutdown)
        members = []
        for own in peers:
            members.append(
                SwarmAverager(
                    [torch.zeros(100)],
                    dht=own.dht,
                    prefix=f"awaited_{awaited}",
                    client_mode=False,
                    min_matchmaking_time=matchmaking_time,
                    start=True,
                )
            )
            ends.callback(members[-1].shutdown)
            members[-1].expected_group_size = 3
        began = time.monotonic()
        controls = [member.step(gather=member.to_tell(0), wait=False, timeout=120) for member in members[:2]]
        while time.monotonic() - began < late_after * matchmaking_time and not controls[0].done():
            for member in members[:2]:
                member.awaited_group_size = awaited
            time.sleep(0.05)
        assert awaited == 3 or controls[0].done(), "it waits for who may be gone"
        members[2].awaited_group_size = awaited
        late = members[2].step(gather=members[2].to_tell(0), wait=False, timeout=120)
        try:
            assert len(controls[0].result(120)) == size
        finally:
            late.cancel()
