"""The authority under 50 joins at once over real HTTP, and under schemathesis: no 5xx, no login in any log."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.local_authority import (
    RUN,
    Authority,
    add_person,
    join_body,
    key,
    make_authority,
    refresh_body,
    served,
)
from volunteer_kit.auth.access_token import KeyFolder
from volunteer_kit.auth.authority import storage

PEERS = 50


@pytest.fixture
def authority(hub, tmp_path, database, monkeypatch) -> Iterator[Authority]:
    monkeypatch.setattr(storage, "PATIENCE", 120)  # clients, Hub and authority share this process
    authority = make_authority(tmp_path, database)
    yield authority
    authority.storage.close()


def at_once(ask: Callable[[Any], requests.Response], items: list[Any]) -> list[requests.Response]:
    with concurrent.futures.ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(ask, items))


def test_fifty_people_join_at_once_and_refresh(authority, hub, caplog, capfd):
    """Two of each account, in the same moment: neither may fail because the other writes the same row."""
    caplog.set_level(logging.DEBUG)
    tokens = [add_person(hub, f"person{number // 2}", "cats") for number in range(PEERS)]
    keys = [key(number % 10) for number in range(PEERS)]
    assert len(set(map(id, keys))) == 10, "ten keys are made; a key may change hands between joins"
    bodies = [join_body(token, number % 10) for number, token in enumerate(tokens)]
    with served(authority) as url:
        joined = at_once(lambda body: requests.post(f"{url}/v1/join", json=body, timeout=240), bodies)
        assert [answer.status_code for answer in joined] == [200] * PEERS, {answer.text for answer in joined}
        refreshes = [refresh_body(number % 10) for number in range(PEERS)]
        asked = at_once(lambda body: requests.post(f"{url}/v1/refresh", json=body, timeout=240), refreshes)
        assert {answer.status_code for answer in asked} == {200}
    printed = caplog.text + "".join(capfd.readouterr())
    assert not [token for token in tokens if token in printed]


def test_a_slow_hub_does_not_hold_up_those_who_are_in(authority, hub):
    import threading

    token = add_person(hub, "anna", "cats")
    with served(authority) as url:
        assert requests.post(f"{url}/v1/join", json=join_body(token), timeout=120).status_code == 200
        asked, answer = threading.Semaphore(0), threading.Event()

        def slow(*_: Any) -> Any:
            asked.release()
            answer.wait()
            raise OSError("the test is over")

        authority.app.state.desk.ask_hub = slow
        with concurrent.futures.ThreadPoolExecutor(60) as pool:
            body = join_body(token)
            waiting = [pool.submit(requests.post, f"{url}/v1/join", json=body, timeout=240) for _ in range(60)]
            try:
                for _ in range(20):
                    assert asked.acquire(timeout=120)
                assert requests.post(f"{url}/v1/refresh", json=refresh_body(), timeout=120).status_code == 200
                assert requests.get(f"{url}/v1/bans", timeout=120).status_code == 200
            finally:
                answer.set()
            assert {future.result().status_code for future in waiting} == {503}


def statuses_of(operation: Any, session: str) -> set[int]:
    """What an address answers to what schemathesis thinks of."""
    statuses: set[int] = set()

    cases = operation.as_strategy() | operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)

    @given(case=cases)
    @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True)
    def try_it(case: schemathesis.Case) -> None:
        for headers in ({}, {"Authorization": f"Bearer {session}"}):
            statuses.add(case.call(headers=headers).status_code)

    try_it()
    return statuses


def test_schemathesis_finds_no_request_that_breaks_it(authority, hub, caplog):
    """Requests made from the schema, right and wrong ones, with and without a moderator's session."""
    caplog.set_level(logging.INFO)
    authority.app.state.desk.pacer.take = lambda *_: None
    authority.app.state.desk.pacer.require_some = lambda *_: None
    sessions = authority.app.state.moderators.sessions
    schema = schemathesis.openapi.from_asgi("/v1/openapi.json", authority.app)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 12
    seen = {operation.label: statuses_of(operation, sessions.open("Mona")) for operation in operations}
    assert all(status < 500 for statuses in seen.values() for status in statuses), seen
    assert any(200 in statuses for statuses in seen.values()) and any(422 in statuses for statuses in seen.values())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# --- the process ---


@pytest.fixture
def run_file(tmp_path) -> Path:
    from volunteer_kit.run_reader import RUN_FILES

    public_key = KeyFolder(tmp_path / "host" / "keys").create(RUN)
    text = (RUN_FILES / "demo.yaml").read_text()
    path = tmp_path / "run.yaml"
    authority = f"{{url: 'http://127.0.0.1:8400', public_key: '{public_key}', users: [anna], moderators: [Mona]}}"
    path.write_text(f"{text}\nauthority: {authority}\n")
    return path


SERVE = "import sys; from volunteer_kit.authority_door import serve_authority; import functools; "
SERVE += "serve_authority(sys.argv[1], folder=sys.argv[2], port=0, say=functools.partial(print, flush=True))"


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_process_serves_ends_and_goes_on_where_it_was(hub, tmp_path, run_file, end):
    token = add_person(hub, "anna")
    log = tmp_path / "log"

    def start() -> tuple[subprocess.Popen, str]:
        with log.open("a") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", SERVE, run_file, tmp_path / "host"], stdout=subprocess.PIPE, stderr=stderr,
                env=hub.environment(tmp_path / "hf"), text=True,
            )  # fmt: skip
        ready = json.loads(process.stdout.readline())["ready"]
        assert ready["moderate"] == ready["url"] + "/moderate" and ready["url"].endswith(str(ready["port"]))
        return process, ready["url"]

    process, url = start()
    try:
        assert requests.post(f"{url}/v1/join", json=join_body(token), timeout=120).status_code == 200
        with requests.Session() as http:
            http.get(f"{url}/v1/bans", timeout=120)
            process.send_signal(end)
            process.wait(120)  # though a connection is open
        process.stdout.close()
        process, url = start()
        assert requests.post(f"{url}/v1/refresh", json=refresh_body(), timeout=120).status_code == 200
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert token not in log.read_text() and "Traceback" not in log.read_text()
