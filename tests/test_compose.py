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
SERVER = (ROOT / "docs" / "server.md").read_text()
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
    assert called["host_maddrs"] == ["/ip4/0.0.0.0/tcp/4001"]
    assert called["announce_maddrs"] == ["/ip4/203.0.113.5/tcp/4001"]


def test_ports_that_another_program_has_are_changed_in_the_env_file(monkeypatch):
    found = services(AUTHORITY_PORT="9000", DASHBOARD_PORT="9001")
    settings = hosted(monkeypatch, found["host"]["command"])["settings"]
    assert (settings.port, settings.dashboard_port) == (9000, 9001)
    assert "http://127.0.0.1:9000/run.yaml" in found["host"]["healthcheck"]["test"][-1]
    assert found["caddy"]["command"][-1] == "127.0.0.1:9000"


def test_what_has_no_default_is_asked_for():
    with pytest.raises(LookupError, match="name that leads to this machine"):
        filled_in(COMPOSE, {"PUBLIC_IP": "203.0.113.5"})
    with pytest.raises(LookupError, match="address of this machine"):
        filled_in(COMPOSE, {"RUN_NAME": "run.example.org"})


def test_the_peers_port_is_the_one_that_the_image_and_the_docs_name(monkeypatch):
    peer_port = listening_port(hosted(monkeypatch, services()["host"]["command"])["host_maddrs"])
    assert instructions("EXPOSE") == [str(peer_port)] and f"80, 443 and {peer_port} (tcp)" in SERVER


def test_a_restart_of_one_container_cuts_no_other_off():
    """The engine restarts a container by itself and tells no other one: none may live in another's namespaces."""
    for service in services().values():
        shared = [service.get(key, "") for key in ("network_mode", "pid", "ipc", "uts")]
        assert not [value for value in shared if value.startswith(("service:", "container:"))]
        assert service["restart"] == "unless-stopped"
        assert not {"depends_on", "links", "volumes_from"} & set(service), "the engine keeps no order"


def test_the_proxy_and_the_authority_meet_on_the_loopback_of_the_machine():
    """The authority believes a proxy's headers from there only. Ports cannot be published beside this network."""
    for service in services().values():
        assert service["network_mode"] == "host" and "ports" not in service and "networks" not in service
    proxy = services()["caddy"]
    command = dict(zip(proxy["command"][2::2], proxy["command"][3::2], strict=True))
    assert command == {"--from": "run.example.org", "--to": f"127.0.0.1:{AUTHORITY_PORT}"}


def test_the_health_check_is_a_program_that_asks_the_authority():
    kind, program, option, code = services()["host"]["healthcheck"]["test"]
    assert (kind, program, option) == ("CMD", "python", "-c")
    compile(code, "health check", "exec")
    assert f"http://127.0.0.1:{AUTHORITY_PORT}/run.yaml" in code


def test_the_docs_name_every_variable_of_the_env_file():
    variables = dict(re.findall(r"\$\{(\w+)(?::-([^}]*))?", COMPOSE))
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \|.*\| ([^|]*) \|$", SERVER, re.M))
    assert rows.keys() == variables.keys()
    for name, default in variables.items():
        assert rows[name] == (f"`{default}`" if default else "none" if name == "PUSH_TO" else "required")


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
