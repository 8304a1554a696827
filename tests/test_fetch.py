"""The model of a running swarm, fetched by a peer that takes no part in it."""

from __future__ import annotations

import pytest

from tests.demo_volunteer import demo_volunteer
from volunteer_kit.checkpoint import load_checkpoint
from volunteer_kit.fetch import fetch_checkpoint
from volunteer_kit.generate import generate_images
from volunteer_kit.home import Home
from volunteer_kit.run_reader import RunError
from volunteer_kit.runs import load_run
from volunteer_kit.swarm.errors import SwarmError

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWLcCbAJZGyAPZ1WuvgvQuSMJ1nZ3XgFBnTCdQCmhGTVTG"


def test_where_nobody_is_known_it_says_whom_to_ask():
    with pytest.raises(RunError, match="nobody to ask(.|\n)*1\\.(.|\n)*2\\.(.|\n)*3\\."):
        fetch_checkpoint("demo")


def test_dead_peers_are_told_as_such(tmp_path):
    with pytest.raises(SwarmError, match="None of the run's first peers answered") as caught:
        fetch_checkpoint("demo", initial_peers=[NOBODY], out=tmp_path)
    assert caught.value.kind == "dead_peers"


@pytest.fixture(scope="module")
def volunteer(tmp_path_factory):
    with demo_volunteer(tmp_path_factory.mktemp("volunteer")) as volunteer:
        yield volunteer


@pytest.mark.slow
def test_the_model_of_a_running_swarm(volunteer, tmp_path):
    volunteer.wait_epoch(3)
    lines: list[str] = []
    path = fetch_checkpoint("demo", initial_peers=volunteer.maddrs, out=tmp_path / "fetched", say=lines.append)
    after = volunteer.wait_epoch(volunteer.epoch + 3)
    found = load_checkpoint(path, fingerprint=load_run("demo").fingerprint)
    assert 3 <= found.epoch and any(f"epoch {found.epoch}" in line for line in lines)
    assert after["group_size"] == 1 and after["failure"] is None  # whoever only asks is not waited for
    drawn = generate_images(["a large red circle"], checkpoint=path, run="demo", out=tmp_path / "drawn")
    assert drawn.epoch == found.epoch and drawn.grid.exists()


@pytest.mark.slow
def test_peers_that_this_machine_has_met_are_asked(volunteer, tmp_path, monkeypatch):
    monkeypatch.setenv("VOLUNTEER_KIT_HOME", str(tmp_path / "home"))
    config = load_run("demo")
    volunteer.wait_epoch(1)
    Home(None, config.run_id, config.fingerprint).save_known_peers(volunteer.maddrs)
    assert load_checkpoint(fetch_checkpoint("demo", out=tmp_path / "fetched")).epoch >= 1


@pytest.mark.slow
def test_a_swarm_of_another_run_has_no_model_for_us(volunteer, tmp_path):
    other = load_run("demo").model_copy(update={"seed": 5})
    with pytest.raises(SwarmError, match="none gave the model(.|\n)*same run file") as caught:
        fetch_checkpoint(other, initial_peers=volunteer.maddrs, out=tmp_path, timeout=3)
    assert caught.value.kind == "no_state"
