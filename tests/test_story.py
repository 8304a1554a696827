"""A worker's events become what a volunteer is shown."""

from __future__ import annotations

import pytest

from volunteer_kit.story import Story, thinned
from volunteer_kit.training.protocol import EVENTS, OFFLINE, dump_event, parse_event
from volunteer_kit.widgets.progress import POINTS, WARNINGS, Progress
from volunteer_kit.widgets.words import headline

SAMPLES = {
    "pid": 1, "name": "n", "device": "CPU", "batch_size": 8, "precision": "fp32", "threads": 1, "why": "because.",
    "checkpointing": True, "done": 43, "total": 100, "rank": 3, "share": 0.25, "sent": 5, "reason": "the line is dead",
    "peer_id": "Qm", "maddrs": [], "client_mode": False, "epoch": 3, "source": "peers", "samples": 8,
    "samples_per_second": 2.5, "loss": 4.25, "num_peers": 3, "swarm_samples": 24, "target_batch_size": 256,
    "total_samples": 80, "group_size": 3, "received": 7, "seconds": 1.5, "sent_bytes": 10, "counts": {"nsfw": 2},
    "kind": "k", "message": "plain words", "path": "/tmp/x", "epochs": 2, "pictures": [], "waiting": 0,
}  # fmt: skip


def event(name: str, **changes) -> dict:
    return parse_event(dump_event(name, **({field: SAMPLES[field] for field in EVENTS[name]} | changes)))


def restarting(exit_code: int) -> dict:
    return {"event": "restarting", "exit_code": exit_code, "delay": 8.0, "restarts": 1, "message": "m"}


def told(*events: dict) -> Progress:
    story = Story(Progress())
    for one in events:
        story.take(one)
    return story.progress


@pytest.mark.parametrize("name", EVENTS)
def test_every_event_of_the_protocol_can_be_taken(name):
    assert told(event(name)).updated > 0


def test_an_event_of_a_later_version_changes_nothing():
    before = Progress()
    assert told({"event": "telepathy", "time": 1.0}).state == before.state


@pytest.mark.parametrize(
    ("events", "state", "detail"),
    [
        ([event("starting")], "starting", "preparing"),
        ([event("device")], "connecting", ""),
        ([event("connected", client_mode=True)], "connecting", "it calls others"),
        ([event("downloading")], "downloading", ""),
        ([event("state_loaded")], "training", ""),
        ([event("averaging")], "averaging", "with 2 others"),
        ([event("averaging"), event("epoch")], "training", ""),
        ([event("cut_off")], "reconnecting", "the line is dead"),
        ([event("cut_off"), event("step")], "reconnecting", "the line is dead"),
        ([event("cut_off"), event("back")], "training", ""),
        ([event("finished"), event("cut_off")], "finished", ""),
        ([event("finished"), event("cut_off"), event("back")], "finished", ""),
        ([event("waiting", reason="It is away.\n1.", seconds=30)], "connecting", "away. Asked again in 30 s"),
        ([restarting(OFFLINE), event("waiting")], "reconnecting", "the line is dead. Asked again"),
        ([restarting(-9)], "restarting", "in 8 s"),
        ([restarting(OFFLINE)], "reconnecting", "in 8 s"),
        ([event("renewing")], "starting", "afresh"),
        ([event("finished")], "finished", ""),
        ([event("error"), {"event": "gave_up", "message": "no way"}], "failed", ""),
    ],
)
def test_states(events, state, detail):
    progress = told(*events)
    assert progress.state == state and detail in progress.detail


def test_numbers_arrive():
    p = told(
        event("device"), event("plan", batch_size=32, why="fastest"), event("step"), event("totals", samples=900),
        event("swarm"), event("traffic"), event("epoch"),
    )  # fmt: skip
    assert p.plan == "batches of 32, fp32, recomputing activations to save memory" and p.why == "fastest"
    assert (p.my_samples, p.my_epochs, p.rank, p.share, p.volunteers) == (900, 2, 3, 0.25, 3)
    assert (p.bytes_sent, p.bytes_received, p.loss, p.epoch) == (5, 7, [(3, 4.25)], 3)


def test_the_place_is_among_those_that_it_was_told_with():
    assert told(event("step", num_peers=5)).volunteers == 5
    p = told(event("swarm", rank=3, num_peers=3), event("step", num_peers=2))
    assert (p.rank, p.volunteers) == (3, 3) and "3rd of 3 volunteers" in headline(p)


def test_the_name_is_the_workers():
    assert told(event("starting") | {"name": "ann"}).name == "ann"


def test_traffic_is_added_up_over_workers():
    p = told(event("traffic", sent=100, received=200), event("starting"), event("traffic", sent=1, received=2))
    assert (p.bytes_sent, p.bytes_received) == (101, 202)


def test_a_download_tells_how_far_it_is_and_ends():
    p = told(event("downloading"))
    assert p.downloaded == 0.43
    assert told(event("downloading"), event("state_loaded")).downloaded is None


def test_the_time_to_the_next_step_is_by_the_samples_that_came_lately():
    steps = [dict(event("step", swarm_samples=n), time=100.0 + n) for n in (10, 20, 30)]
    assert told(*steps).seconds_to_step == pytest.approx(226.0)
    assert told(*steps, dict(event("step", swarm_samples=5), time=131.0)).swarm_samples == 5  # the next epoch


def test_warnings_are_few_and_each_once():
    p = told(*[event("warning", message=f"w{n % 7}") for n in range(20)])
    texts = [text for _, text in p.warnings]
    assert len(texts) == WARNINGS and len(set(texts)) == WARNINGS and texts[-1] == "w5"


def test_pictures_are_read_and_lost_ones_passed_over(tmp_path):
    (tmp_path / "a.png").write_bytes(b"png")
    shown = [{"caption": "a", "path": str(tmp_path / "a.png")}, {"caption": "b", "path": str(tmp_path / "b.png")}]
    p = told(event("pictures", pictures=shown))
    assert [(one.caption, one.png) for one in p.pictures] == [("a", b"png")]
    assert told(event("pictures", pictures=shown), event("pictures")).pictures == p.pictures


def test_a_long_curve_is_thinned_and_keeps_its_ends():
    points = []
    for epoch in range(5000):
        points = thinned([*points, (epoch, 1.0)])
        assert len(points) <= POINTS
    assert points[0][0] == 0 and points[-1][0] == 4999


def test_a_picture_for_other_processes_comes_back_whole():
    p = told(event("device"), event("step"), event("epoch"), event("warning"))
    again = Progress.from_dict(p.as_dict() | {"of a later version": 1})
    assert again == p
    with pytest.raises(ValueError):
        Progress.from_dict({"state": "flying"})
