"""A forked child behaves as a program that was started, and shares nothing with the children before it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import nursery

PATIENCE = 120.0  # s


@contextlib.contextmanager
def child(log: Path, *arguments: str, **environment: str) -> Iterator[tuple[nursery.Child, dict]]:
    """Start tests/nursling.py; it is killed at the end. Gives the child and its first words."""
    one = nursery.start("tests.nursling", [*arguments], log=log, environment={**os.environ, **environment})
    try:
        yield one, json.loads(one.stdout.readline())
    finally:
        one.kill()
        one.wait(PATIENCE)


def order(one: nursery.Child, what: object) -> None:
    one.stdin.write(json.dumps(what) + "\n")
    one.stdin.flush()


def test_arguments_environment_session_and_chance_are_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("NURSLING_LEFT_OUT", "1")
    with child(tmp_path / "1", "a", "b", NURSLING="1") as (one, said), child(tmp_path / "2") as (other, also_said):
        assert said["arguments"] == ["a", "b"] and also_said["arguments"] == []
        assert said["environment"]["NURSLING"] == "1" and "NURSLING" not in also_said["environment"]
        assert said["leads"] and also_said["leads"] and one.pid != other.pid
        assert said["threads"] == 1 and Path(said["folder"]) == nursery.ROOT
        assert not {*said["drawn"]} & {*also_said["drawn"]}


def test_it_ends_as_a_program_does_and_its_end_is_told(tmp_path):
    with child(tmp_path / "log") as (one, _):
        assert one.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            one.wait(0.01)
        order(one, 7)
        assert one.wait(PATIENCE) == one.poll() == 7
    with child(tmp_path / "log") as (one, _):
        order(one, "fail")
        assert one.wait(PATIENCE) == 1
        assert "ValueError: as it was told" in (tmp_path / "log").read_text()
    with child(tmp_path / "log") as (one, _):
        one.stdin.close()
        assert one.wait(PATIENCE) == 0 and one.stdout.read() == ""
    with child(tmp_path / "log") as (one, _):
        one.kill()
        assert one.wait(PATIENCE) == -signal.SIGKILL
        assert not psutil.pid_exists(one.pid)


def test_a_child_killed_with_a_lock_of_hivemind_takes_it_along(tmp_path):
    for name in ("first", "second"):
        with child(tmp_path / name) as (one, _):
            order(one, "take the lock")
            assert json.loads(one.stdout.readline())["is_taken"]
