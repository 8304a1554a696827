"""Hosting on a server: compose.yaml and Dockerfile fit the code that they start."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import volunteer_kit.host
from volunteer_kit import __version__
from volunteer_kit.cli import app
from volunteer_kit.host.folder import HostFolder
from volunteer_kit.host.settings import AUTHORITY_PORT, DASHBOARD_PORT, HostSettings, authority_url, listening_port

ROOT = Path(__file__).parents[1]
COMPOSE = (ROOT / "compose.yaml").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
GIVEN = {"RUN_NAME": "run.example.org", "PUBLIC_IP": "203.0.113.5"}


def filled_in(text: str, given: dict[str, str]) -> dict[str, Any]:
    """The file as compose reads it: ${NAME}, ${NAME:-default} and ${NAME:?message}."""

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match["name"], match["kind"], match["rest"]
        if name not in given and kind == ":?":
            raise LookupError(rest)
        return given.get(name, rest or "")

    return yaml.safe_load(re.sub(r"\$\{(?P<name>\w+)(?:(?P<kind>:[-?])(?P<rest>[^}]*))?\}", value, text))


def services(**given: str) -> dict[str, Any]:
    return filled_in(COMPOSE, {**GIVEN, **given})["services"]


def hosted(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> dict[str, Any]:
    """The arguments that `volunteer-kit` reads from the container's command line."""
    called: dict[str, Any] = {}
    monkeypatch.setattr(volunteer_kit.host, "host_run", lambda run, **options: called.update(options, run=run))
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return called


def instructions(name: str) -> list[str]:
    """The arguments of a Dockerfile's instructions of this name, in order."""
    joined = re.sub(r"\\\n\s*", " ", DOCKERFILE)
    return [line.partition(" ")[2] for line in joined.splitlines() if line.startswith(f"{name} ")]


def test_the_containers_command_starts_a_host_behind_a_proxy(monkeypatch):
    host = services()["host"]
    called = hosted(monkeypatch, host["command"])
    settings: HostSettings = called["settings"]
    assert authority_url(settings) == "https://run.example.org"
    assert settings.behind_proxy and (settings.port, settings.dashboard_port) == (AUTHORITY_PORT, DASHBOARD_PORT)
    assert called["announce_maddrs"] == ["/ip4/203.0.113.5/tcp/31337"]
    assert not settings.push_to and settings.database is None
    assert called["run"] == host["configs"][0]["target"]


def test_options_of_the_env_file_reach_the_command(monkeypatch):
    host = services(PUSH_TO="org/name", PEER_PORT="4001")["host"]
    called = hosted(monkeypatch, host["command"])
    assert called["settings"].push_to == "org/name"
    assert called["host_maddrs"] == ["/ip4/0.0.0.0/tcp/4001"] and "4001:4001" in host["ports"]


def test_what_has_no_default_is_asked_for():
    with pytest.raises(LookupError, match="name that leads to this machine"):
        filled_in(COMPOSE, {"PUBLIC_IP": "203.0.113.5"})
    with pytest.raises(LookupError, match="address of this machine"):
        filled_in(COMPOSE, {"RUN_NAME": "run.example.org"})


def test_the_ports_that_are_published_are_those_that_are_listened_on(monkeypatch):
    host = services()["host"]
    peer_port = listening_port(hosted(monkeypatch, host["command"])["host_maddrs"])
    assert f"{peer_port}:{peer_port}" in host["ports"] and {"80:80", "443:443"} <= set(host["ports"])
    assert not any(str(port) in "".join(host["ports"]) for port in (AUTHORITY_PORT, DASHBOARD_PORT))
    assert instructions("EXPOSE") == [str(peer_port)]


def test_the_proxy_passes_on_to_the_authority_within_the_same_loopback():
    proxy = services()["caddy"]
    assert proxy["network_mode"] == "service:host"
    command = dict(zip(proxy["command"][2::2], proxy["command"][3::2], strict=True))
    assert command == {"--from": "run.example.org", "--to": f"127.0.0.1:{AUTHORITY_PORT}"}


def test_the_health_check_is_a_program_that_asks_the_authority():
    kind, program, option, code = services()["host"]["healthcheck"]["test"]
    assert (kind, program, option) == ("CMD", "python", "-c")
    compile(code, "health check", "exec")
    assert f"http://127.0.0.1:{AUTHORITY_PORT}/run.yaml" in code


def test_keys_and_state_lie_on_volumes_whose_folders_belong_to_the_user(monkeypatch):
    file = filled_in(COMPOSE, GIVEN)
    host = file["services"]["host"]
    mounted = dict(volume.split(":") for volume in host["volumes"])
    folder = HostFolder(hosted(monkeypatch, host["command"])["folder"])
    assert Path(mounted["keys"]) == folder.keys and folder.path.is_relative_to(mounted["state"])
    assert {*mounted, "caddy"} == set(file["volumes"])
    (made,) = [line for line in instructions("RUN") if "useradd" in line]
    assert set(mounted.values()) <= set(shlex.split(made)) and "-o kit" in made
    assert instructions("USER") == ["10001:10001"] and "--uid 10001" in made and "privileged" not in host


def test_no_secret_is_in_the_image_or_in_the_compose_file():
    for name in ("HF_TOKEN", "VOLUNTEER_KIT_DATABASE"):
        assert not [line for line in instructions("ENV") + instructions("ARG") if name in line]
        assert not re.search(rf"^[^#]*{name}", COMPOSE, re.M)
    assert services()["host"]["env_file"] == [{"path": "host.env", "required": False}]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".env", "*.env", "*-host"} <= set(ignored)


def test_the_image_is_made_of_the_wheel_with_the_torch_of_the_tests():
    pinned = re.search(r"torch==([\d.]+)", (ROOT / "Makefile").read_text()).group(1)
    runs = instructions("RUN")
    assert any(f"torch=={pinned} " in line and "whl/cpu" in line for line in runs)
    (install,) = [line for line in runs if "[server]" in line]
    assert "/wheel/*.whl" in install and "volunteer-kit setup" in install
    assert instructions("ENTRYPOINT") == ['["volunteer-kit"]']
    assert services()["host"]["image"] == f"volunteer-kit:{__version__}"
    needed = {"setup.cfg", "pyproject.toml", "requirements.txt", "README.md", "volunteer_kit", "notebooks"}
    assert not needed & set((ROOT / ".dockerignore").read_text().splitlines())


def test_the_workflow_calls_the_ci_script_on_every_python():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    job = workflow["jobs"]["tests"]
    assert job["strategy"]["matrix"]["python"] == ["3.10", "3.11", "3.12", "3.13"]
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    assert "$(PYTHON)" in (ROOT / "Makefile").read_text()
