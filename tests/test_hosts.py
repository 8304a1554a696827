"""Servers that failed are left alone for a while, and others are asked; who has no other waits."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest

from tests.shard_files import FAST, answering, good_shard, open_source, read, serve
from volunteer_kit.data import hosts as room
from volunteer_kit.data.hosts import LONGEST_PAUSE, MAX_HOSTS, Hosts, host_of, hosts_of
from volunteer_kit.data.source import ShardError
from volunteer_kit.data.sources import usable_records

A, B = "http://a.example/1.tar", "http://b.example/1.tar"


@pytest.fixture
def hosts(clock):
    return Hosts(clock)


def left_for(hosts: Hosts, url: str, clock) -> float:
    """Seconds until `url` may be asked, by asking."""
    started = clock.now
    while True:
        try:
            hosts.check(url)
        except ShardError:
            clock.now += 0.5
        else:
            waited, clock.now = clock.now - started, started
            return waited


def test_pauses_grow_and_end(hosts, clock):
    assert left_for(hosts, A, clock) == 0
    pauses = []
    for _ in range(14):
        hosts.failed(A, "connection refused")
        pauses.append(left_for(hosts, A, clock))
    assert pauses[:4] == [2, 4, 8, 16] and max(pauses) == pauses[-1] == LONGEST_PAUSE
    assert left_for(hosts, B, clock) == 0 and left_for(hosts, "/a/path.tar", clock) == 0
    hosts.worked(A)
    assert left_for(hosts, A, clock) == 0
    hosts.failed(A, "connection refused")
    assert left_for(hosts, A, clock) == 2


@pytest.mark.parametrize("asked_for, pause", [(0, 2), (1, 2), (90, 90), (1e12, LONGEST_PAUSE)])
def test_what_a_server_asks_for(asked_for, pause, hosts, clock):
    hosts.failed(A, "HTTP 429", asked_for)
    assert left_for(hosts, A, clock) == pause


def test_what_is_said(hosts):
    hosts.failed("http://me:secret@A.example:80/1.tar?token=x", "HTTP 503 Busy")
    with pytest.raises(ShardError) as error:
        hosts.check("http://me:secret@a.example:80/2.tar?token=x")
    assert str(error.value) == "HTTP 503 Busy; a.example:80 is left alone for 2 s more"
    assert error.value.cause == "unreachable_shard"


def test_places():
    addresses = {
        "https://u:p@Host:8/x": "host:8", "http://h": "h", "HTTP://H/x": "h", "/a/b": None, "http.tar": None,
        "http://[::1]:8/x": "[::1]:8", "http://[::1": "http://[::1",
    }  # fmt: skip
    assert {url: host_of(url) for url in addresses} == addresses
    assert hosts_of([A, B, "https://a.example/2.tar", "x.tar"]) == {"a.example", "b.example", None}


def test_memory_is_bounded(hosts, clock):
    for number in range(MAX_HOSTS + 100):
        hosts.failed(f"http://h{number}/x", "no answer in time")
    assert not hosts.is_doubtful("http://h0/x") and hosts.is_doubtful(f"http://h{MAX_HOSTS + 99}/x")
    assert hosts.is_doubtful("http://h100/x") and not hosts.is_doubtful("http://h99/x")


def test_who_has_another_place_does_not_wait(hosts, clock):
    both = hosts_of([A, B])
    hosts.failed(A, "connection refused")
    assert hosts.pause(both) == 0 and hosts.pause(hosts_of([A, "file.tar"])) == 0
    assert hosts.pause(hosts_of([A])) == 2
    hosts.failed(B, "no answer in time", 60)
    assert hosts.pause(both) == 2
    clock.now += 2
    assert hosts.pause(both) == 0


def test_who_has_no_other_place_asks_sooner_unless_told_not_to(hosts, clock):
    for _ in range(9):
        hosts.failed(A, "connection refused")
    assert hosts.pause(hosts_of([A])) == room.ALONE_PAUSE
    clock.now += room.ALONE_PAUSE
    hosts.check(A)
    hosts.failed(B, "HTTP 429", 90)
    assert hosts.pause(hosts_of([B])) == 90


# with servers


def http_date(seconds: float) -> str:
    return formatdate(time.time() + seconds, usegmt=True)


@pytest.mark.parametrize("retry_after", [lambda: "40", lambda: "3600", lambda: http_date(3600)])
def test_a_server_that_asks_for_long_is_asked_once_for_all_its_shards(retry_after, tmp_path):
    good_shard(tmp_path / "x.tar", 5)
    asked = []

    def busy(number: int, range_: str | None) -> list[bytes]:
        asked.append(number)
        return [f"HTTP/1.1 429 Too Many Requests\r\nRetry-After: {retry_after()}\r\n\r\n".encode()]

    with answering(busy) as url:
        records, counts = read(*(f"{url}{n}" for n in range(20)), tmp_path / "x.tar", patience=10_000)
    assert len(records) == 5 and counts == {"unreachable_shard": 20} and len(asked) == 1


def test_a_short_retry_after_is_waited_for(tmp_path):
    shard = good_shard(tmp_path / "x.tar", 5).read_bytes()
    came = []

    def busy(number: int, range_: str | None) -> list[bytes]:
        came.append(time.monotonic())
        if number == 0:
            return [b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\n\r\n"]
        return [b"HTTP/1.1 200 OK\r\n\r\n", shard]

    with answering(busy) as url:
        records, counts = read(url)
    assert len(records) == 5 and not counts and came[1] - came[0] >= 1


def test_a_dead_server_costs_the_others_little(tmp_path):
    """Its first shard is tried as often as the limits say, its others not at all."""
    good_shard(tmp_path / "x.tar", 5)
    with serve(tmp_path) as good, serve(tmp_path) as bad:
        dead = [f"{bad.url}/status/500" for _ in range(10)]
        records, counts = read(*dead[:5], f"{good.url}/ok/x.tar", *dead[5:], f"{good.url}/ok/x.tar")
        assert len(records) == 10 and counts == {"unreachable_shard": 10}
        assert len(bad.asked) == 1 + FAST.retries


def test_after_its_pause_a_server_has_one_attempt(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "FIRST_PAUSE", 0.0)
    good_shard(tmp_path / "x.tar", 5)
    with serve(tmp_path) as bad:
        records, counts = read(*(f"{bad.url}/status/500" for _ in range(4)), f"{bad.url}/ok/x.tar")
        assert len(records) == 5 and counts == {"unreachable_shard": 4}
        assert len(bad.asked) == (1 + FAST.retries) + 3 + 1
        read(f"{bad.url}/status/500")  # it was well again
        assert len(bad.asked) == (1 + FAST.retries) + 3 + 1 + (1 + FAST.retries)


def test_a_slow_server_is_left_for_others(tmp_path):
    good_shard(tmp_path / "x.tar", 60)
    with serve(tmp_path) as slow:
        source = open_source(f"{slow.url}/drip/x.tar", tmp_path / "x.tar", limits=FAST._replace(timeout=1.0))
        said = []
        for _ in range(2):
            with pytest.raises(ShardError) as error:
                list(usable_records(source, source.shards[0], time.monotonic() + 60))
            said.append(str(error.value))
        assert said[0] == "slower than 1000 bytes/s" and "is left alone" in said[1] and len(slow.asked) == 1


def test_the_only_server_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "FIRST_PAUSE", 100.0)
    monkeypatch.setattr(room, "ALONE_PAUSE", 0.3)
    good_shard(tmp_path / "x.tar", 5)
    once = FAST._replace(retries=0)
    with serve(tmp_path) as server:
        shards = [f"{server.url}/status/500", f"{server.url}/ok/x.tar"]
        records, counts = read(*shards, limits=once)
        assert len(records) == 5 and counts == {"unreachable_shard": 1}
    monkeypatch.setattr(room, "ALONE_PAUSE", 100.0)
    with serve(tmp_path) as server:
        shards = [f"{server.url}/status/500", f"{server.url}/ok/x.tar"]
        started = time.monotonic()
        records, counts = read(*shards, limits=once, patience=3)  # what is not worth waiting for is told at once
        assert not records and counts == {"unreachable_shard": 2} and time.monotonic() - started < 50
