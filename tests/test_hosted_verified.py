"""A hosted run that verifies: whoever comes is checked, told so in words, and credited."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub import Hub
from tests.monitored import Volunteer
from tests.test_hosted_run import CREDITED, UP, HostOfTwo, token_of, wait_until
from volunteer_kit.runs import load_run
from volunteer_kit.training.protocol import WorkerSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        for name in ("ada", "bob", "mona"):
            hub.tokens[token_of(name)], hub.rights[token_of(name)] = name, {"role": "read"}
        yield hub


def verified(text: str) -> str:
    section = "\nverification: {share: 0.3}\n\nswarm:\n  commits: true\n  aggregation: centered_clip\n  # "
    return text.replace("\nswarm:", section, 1)


def join(name: str, folder: Path, host: HostOfTwo, again: int = 0) -> Volunteer:
    run, home = load_run(host.link), folder / name
    home.mkdir(exist_ok=True)
    spec = WorkerSpec(
        run=run.model_dump(mode="json"), name=name, initial_peers=list(run.initial_peers), home=str(home),
        host_maddrs=["/ip4/127.0.0.1/tcp/0"], client_mode=False, threads=1, batch_size=64,
        peer_seed=len(name) + again, hf_token=token_of(name),
    )  # fmt: skip
    return Volunteer(folder / f"{name}-{again}.log", spec)


def leave(volunteer: Volunteer) -> None:
    volunteer.order('{"command": "leave"}')
    volunteer.wait_event("left")


def told(volunteer: Volunteer) -> str:
    return " ".join(event["message"] for event in volunteer.events if event["event"] == "warning")


def counts(event: dict) -> bool:
    """Does this event tell the volunteer that its work enters? The kit says it in words, or only counts the samples
    where the others took its work in the first round that it finished."""
    is_told = event["event"] == "warning" and "counts from now on" in event["message"]
    return is_told or (event["event"] == "totals" and event["samples"] > 0)


def test_whoever_comes_is_checked_credited_and_told_so(tmp_path, hub):
    host, here = HostOfTwo(tmp_path, hub, edit=verified), []
    try:
        host.start()
        here.append(ada := join("ada", tmp_path, host))
        ada.wait_for(lambda event: event["event"] == "step" and event["epoch"] >= 1, UP)
        here.append(bob := join("bob", tmp_path, host))
        wait_until(lambda: host.credit_of("ada"), CREDITED, "who comes first has credit, though nobody could check it")
        bob.wait_for(counts, CREDITED)
        wait_until(lambda: host.credit_of("bob"), CREDITED, "who was found right has credit")
        leave(ada)
        here.append(again := join("ada", tmp_path, host, again=1))  # the same machine: it is trusted still
        again.wait_for(lambda event: event["event"] == "epoch" and event["group_size"] > 1, UP)
        before = host.credit_of("bob"), host.credit_of("ada")  # credit of the first stay comes late
        wait_until(lambda: host.credit_of("bob") > before[0], CREDITED, "it goes on without who had checked it")
        wait_until(lambda: host.credit_of("ada") > before[1], CREDITED, "and so does who comes back")
        leave(bob), leave(again)
        for volunteer in here:
            said = told(volunteer)
            assert "shut out" not in said and "have confirmed" not in said, said
    finally:
        for volunteer in here:
            volunteer.kill()
        host.close()
