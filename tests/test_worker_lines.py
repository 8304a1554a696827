"""The worker's lines: events and commands as they cross its pipes, and what is none."""

from __future__ import annotations

import json

import pytest

from volunteer_kit.training.protocol import EVENTS, FinishAt, Leave, WorkerSpec, dump_event, parse_command, parse_event


def test_an_event_is_one_line_and_comes_back():
    line = dump_event(
        "epoch", epoch=3, samples=8, total_samples=20, loss=1.5, group_size=2, received=1.0, seconds=0.5, sent_bytes=7
    )
    assert "\n" not in line
    event = parse_event(line)
    assert event["event"] == "epoch" and event["loss"] == 1.5 and event["time"] > 1e9
    assert parse_event(dump_event("warning", kind="x", message="two\nlines"))["message"] == "two\nlines"


def test_an_event_that_nobody_could_read_is_an_error_of_ours():
    with pytest.raises(KeyError):
        dump_event("party", cake=1)
    with pytest.raises(ValueError, match="total_samples"):
        dump_event("left", epochs=3)
    with pytest.raises(ValueError):
        dump_event("left", epochs=float("nan"), total_samples=1)  # no JSON


@pytest.mark.parametrize(
    "line", ["", "Downloading: 5%", "{}", "[]", "3", '"epoch"', '{"event": "party"}', '{"event": ["epoch"]}', "{"]
)
def test_a_library_s_print_is_no_event(line):
    assert parse_event(line) is None


def test_commands():
    assert parse_command('{"command": "finish_at", "epoch": 7}') == FinishAt(epoch=7)
    assert parse_command(Leave().model_dump_json()) == Leave()
    for line in (
        "",
        "leave",
        "{}",
        '{"command": "finish_at"}',
        '{"command": "rm"}',
        '{"command": "finish_at", "epoch": "x"}',
    ):
        with pytest.raises(ValueError):
            parse_command(line)


def test_a_spec_crosses_the_pipe_unchanged():
    spec = WorkerSpec(run={"run_id": "x"}, name="a laptop", initial_peers=["/ip4/1.2.3.4/tcp/1/p2p/Qm"], batch_size=4)
    assert WorkerSpec.model_validate_json(spec.model_dump_json()) == spec
    with pytest.raises(ValueError, match="batchsize"):
        WorkerSpec.model_validate(json.loads('{"run": {}, "batchsize": 4}'))
    assert all(isinstance(fields, tuple) for fields in EVENTS.values())
