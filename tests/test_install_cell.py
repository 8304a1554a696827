"""The first cell of a run's notebook: it installs the host's wheel beside what a platform brings."""

from __future__ import annotations

import ast
import ensurepip
import functools
import hashlib
import http.server
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from packaging.version import Version

from tests.small_wheels import Platform, make_wheel
from tests.waiting import wait_until
from volunteer_kit.host import install_cell

CELL = Path(install_cell.__file__)
PINNED = {"dalle-pytorch": "1.6.6", "taming-transformers-rom1504": "0.0.6"}
KIT = {"volunteer_kit/__init__.py": "", "volunteer_kit/say.py": "print('the kit says hello')\n"}


@pytest.fixture
def served(tmp_path):
    """A folder that is served over HTTP: (folder, its address)."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield folder, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def make_platform(tmp_path):
    """A platform whose index has what the cell installs without its requirements."""

    def make(brings, requires=None):
        platform = Platform(tmp_path, brings, requires)
        for name, version in PINNED.items():
            make_wheel(platform.index, name, version, ["nothing-that-exists"])
        return platform

    return make


def filled(folder: Path, wheel: Path, urls: list[str], sha256: str | None = None, before: str = "") -> str:
    """The path of a script: the cell as a host fills it in."""
    values = {
        "WHEEL_URLS": repr(urls), "VERSION": repr(wheel.name.split("-")[1]),
        "SHA256": repr(sha256 or hashlib.sha256(wheel.read_bytes()).hexdigest()),
    }  # fmt: skip
    text = CELL.read_text()
    for name, value in values.items():
        text, count = re.subn(f"(?m)^{name} = .*$", f"{name} = {value}", text)
        assert count == 1
    path = folder / "cell.py"
    path.write_text(before + text)
    return str(path)


def test_a_host_finds_its_three_lines_at_the_top_and_old_pythons_can_read_the_cell():
    text = CELL.read_text()
    assert [line.split(" = ")[0] for line in text.splitlines()[1:4]] == ["WHEEL_URLS", "SHA256", "VERSION"]
    ast.parse(text, feature_version=(3, 8))  # such a kernel has to get as far as the words about it
    names = {n.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.alias)}
    assert not any(name.startswith("volunteer_kit") for name in names)


def test_it_installs_what_the_makefile_installs_without_requirements():
    line = "pip install --no-deps " + " ".join(install_cell.PINNED)
    assert line in (CELL.parents[2] / "Makefile").read_text()
    assert set(install_cell.PINNED) == {f"{name}=={version}" for name, version in PINNED.items()}


def test_nothing_that_the_platform_brings_changes(make_platform, served, tmp_path):
    brings = {"numpy": "1.0", "torch": "2.11.0+cu128", "protobuf": "5.29.6"}
    if Version(ensurepip.version()) < Version("24.1"):  # newer ones install nothing beside such a version
        brings["odd"] = "1.0-of-a-distribution"
    platform = make_platform(brings)
    (platform.site / "~umpy-0.9.dist-info").mkdir()  # what an uninstall on Windows or a crash leaves
    (platform.site / "~umpy-0.9.dist-info/METADATA").write_text("Metadata-Version: 2.1\n")
    make_wheel(platform.index, "numpy", "2.0")
    make_wheel(platform.index, "torch", "2.13.0")
    make_wheel(platform.index, "protobuf", "7.0")
    make_wheel(platform.index, "grpcio-tools", "1.85", ["protobuf>=7"])
    make_wheel(platform.index, "grpcio-tools", "1.71", ["protobuf>=5,<6"])
    folder, url = served
    wheel = make_wheel(folder, "volunteer-kit", "0.3.0", ["numpy", "torch>=2", "grpcio-tools>=1"], KIT)
    script = filled(tmp_path, wheel, [f"{url}/{wheel.name}"])

    done = platform.run(script)
    assert done.returncode == 0, done.stdout
    assert "ready" in done.stdout and "Collecting" not in done.stdout.replace("\r", "\n").split("ready")[-1]
    now = platform.versions()
    assert {name: now[name] for name in brings} == brings
    assert now.items() >= {"volunteer-kit": "0.3.0", "grpcio-tools": "1.71", **PINNED}.items()
    assert "Changed" not in done.stdout and f"{len(brings)} packages" not in done.stdout.replace("pip", "")

    (platform.site / "pip").rename(platform.site / "no-pip-any-more")
    (folder / wheel.name).unlink()
    again = platform.run(script)  # asks for neither
    assert "installed already" in again.stdout, again.stdout


def test_only_what_has_to_change_changes_and_it_is_said(make_platform, served, tmp_path):
    brings = {"numpy": "1.0", "pandas": "1.0", "pyarrow": "18.1", "fsspec": "1.0"}
    platform = make_platform(brings, {"pandas": ["numpy>=1"]})
    for name, version, requires in [
        ("numpy", "2.0", []), ("pandas", "2.0", ["numpy>=2"]), ("pyarrow", "26.0", []), ("fsspec", "2.0", []),
        ("datasets", "5.0", ["pyarrow>=26", "pandas", "fsspec>=2"]), ("datasets", "4.0", ["pyarrow>=18", "pandas"]),
    ]:  # fmt: skip
        make_wheel(platform.index, name, version, requires)
    folder, url = served
    wheel = make_wheel(folder, "volunteer-kit", "0.3.0", ["numpy>=2", "datasets>=4", "pandas"], KIT)
    done = platform.run(filled(tmp_path, wheel, [f"{url}/{wheel.name}"]))
    assert done.returncode == 0, done.stdout
    assert "numpy  1.0 -> 2.0" in done.stdout
    assert done.stdout.count("->") == 1
    assert platform.versions().items() >= {**brings, "numpy": "2.0", "datasets": "4.0"}.items()


def test_an_older_kit_and_another_build_of_the_same_version_are_replaced(make_platform, served, tmp_path):
    platform = make_platform({})
    folder, url = served
    older = make_wheel(tmp_path / "older", "volunteer-kit", "0.2.0", [], KIT)
    other = make_wheel(tmp_path / "other", "volunteer-kit", "0.3.0", [], {**KIT, "volunteer_kit/say.py": "1 / 0\n"})
    wheel = make_wheel(folder, "volunteer-kit", "0.3.0", [], KIT)
    urls = [f"{url}/{wheel.name}"]
    for what in (older, other):
        platform.run("-m", "pip", "install", "--force-reinstall", str(what))
        done = platform.run(filled(tmp_path, wheel, urls))
        assert done.returncode == 0, done.stdout
        assert "takes its place" in done.stdout
        assert "the kit says hello" in platform.run("-c", "import volunteer_kit.say").stdout
        assert "installed already" in platform.run(filled(tmp_path, wheel, urls)).stdout

    platform.run("-m", "pip", "install", str(older))
    used = platform.run(filled(tmp_path, wheel, urls, before="import volunteer_kit.say\n"))
    assert used.returncode != 0 and "Restart session" in used.stdout  # the next cells would use the old one
    assert "installed already" in platform.run(filled(tmp_path, wheel, urls)).stdout


def test_the_hub_has_it_when_the_host_does_not(make_platform, served, tmp_path):
    platform = make_platform({})
    folder, url = served
    wheel = make_wheel(folder, "volunteer-kit", "0.3.0", [], KIT)
    done = platform.run(filled(tmp_path, wheel, ["http://127.0.0.1:9/gone.whl", f"{url}/{wheel.name}"]))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["volunteer_kit-0.3.0-py3-none-any.whl"], "The host has a newer version of the kit"),
        (["absent.whl"], "Open the run's link again"),
        (["http://127.0.0.1:9/gone.whl"], "does not answer"),
        (["http://host.invalid/gone.whl"], "phone number"),
    ],
)
def test_a_wheel_that_is_not_there_is_explained(served, names, words):
    folder, url = served
    make_wheel(folder, "volunteer-kit", "0.3.0", [], KIT)
    urls = [name if "://" in name else f"{url}/{name}" for name in names]
    with pytest.raises(install_cell.NotInstalled, match=re.escape(words)) as caught:
        install_cell.download(urls, "0" * 64)
    assert caught.value._render_traceback_() == str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
        ("NewConnectionError('...: Failed to establish a new connection: [Errno -3]", "Internet on"),
        ("error: externally-managed-environment", "python3 -m venv"),
        ("[Errno 13] Permission denied: '/usr/lib/python3'", "python3 -m venv"),
        ("ERROR: ResolutionImpossible: for help visit", "No set of versions fits"),
        ("no such option: --report", "pip is too old"),
        ("ERROR: something new", "send these lines"),
    ],
)
def test_what_pip_says_is_explained(log, words):
    text = install_cell.explained("Collecting numpy\n" + log)
    assert words in text and log[:60] in text


def test_a_python_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    with pytest.raises(install_cell.NotInstalled, match="3.10 or newer, and this kernel runs 3.9.18"):
        install_cell.install([], "", "0.3.0")


def test_a_pip_that_fails_changes_nothing_and_shows_its_last_lines(make_platform, served, tmp_path):
    platform = make_platform({"numpy": "1.0"})
    folder, url = served
    wheel = make_wheel(folder, "volunteer-kit", "0.3.0", ["not-in-the-index"], KIT)
    done = platform.run(filled(tmp_path, wheel, [f"{url}/{wheel.name}"]))
    assert done.returncode != 0
    assert "not-in-the-index" in done.stdout and "No set of versions fits" in done.stdout
    assert platform.versions() == {"numpy": "1.0"}


def test_what_an_installed_kit_lacks_is_added(make_platform, tmp_path):
    platform = make_platform({"numpy": "1.0", "volunteer-kit": "0.3.0"},
                             {"volunteer-kit": ["numpy", "einops>=0.8", "peft; extra == 'hf'"]})  # fmt: skip
    (platform.site / "volunteer_kit.py").unlink()
    (platform.site / "volunteer_kit").mkdir()
    for name, version in [("numpy", "2.0"), ("einops", "0.7"), ("einops", "0.8"), ("peft", "0.17")]:
        make_wheel(platform.index, name, version)
    make_wheel(platform.index, "volunteer-kit", "0.3.0", [], {"volunteer_kit/__init__.py": "1 / 0"})  # not asked for
    done = platform.run("-c", prepare(extras=["hf"]))
    assert done.returncode == 0, done.stdout
    assert platform.versions().items() >= {"numpy": "1.0", "einops": "0.8", "peft": "0.17", **PINNED}.items()
    assert not (platform.site / "volunteer_kit/__init__.py").exists()
    (platform.site / "pip/__main__.py").unlink()  # it is not asked again
    assert "is ready" in platform.run("-c", prepare(extras=["hf"])).stdout


def test_a_checkout_is_installed_where_it_lies_and_at_hand_at_once(make_platform, tmp_path):
    platform = make_platform({"numpy": "1.0"})
    make_wheel(platform.index, "numpy", "2.0")
    checkout = tmp_path / "check out"
    (checkout / "volunteer_kit").mkdir(parents=True)
    (checkout / "volunteer_kit/say.py").write_text(KIT["volunteer_kit/say.py"])
    (checkout / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (checkout / "backend.py").write_text(
        "import sys; from pathlib import Path\n"
        f"sys.path.append({str(Path(__file__).parents[1])!r})\n"
        "def build_editable(folder, *_):\n"
        "    from tests.small_wheels import make_wheel\n"
        "    files = {'kit.pth': str(Path(__file__).parent)}\n"
        "    return make_wheel(Path(folder), 'volunteer-kit', '0.3.0', ['numpy'], files).name\n"
    )
    done = platform.run("-c", prepare(checkout) + "; import volunteer_kit.say")
    assert done.returncode == 0, done.stdout
    assert "the kit says hello" in done.stdout
    assert platform.versions()["numpy"] == "1.0"
    (platform.site / "pip/__main__.py").unlink()
    assert "is ready" in platform.run("-c", prepare(checkout)).stdout


def prepare(*arguments, **named) -> str:
    """A line of Python, as in the notebooks of a checkout."""
    given = ", ".join([*(repr(str(one)) for one in arguments), *(f"{k}={v!r}" for k, v in named.items())])
    return f"import runpy; runpy.run_path({str(CELL)!r})['prepare']({given})"


def test_the_stop_button_ends_pip_and_all_that_it_started(tmp_path):
    slow = tmp_path / "slow"
    slow.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/pid\nwait\n")
    slow.chmod(0o755)
    script = (
        "import sys; from pathlib import Path; from volunteer_kit.host.install_cell import run_pip\n"
        f"sys.executable = {str(slow)!r}\n"
        f"run_pip(['install'], 'the kit', Path({str(tmp_path)!r}), 0.0)"
    )
    cell = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    started = tmp_path / "pid"
    wait_until(lambda: started.exists() and started.read_text().strip(), 60)
    child = psutil.Process(int(started.read_text()))
    cell.send_signal(signal.SIGINT)
    _, said = cell.communicate(timeout=60)
    assert "Stopped. Run this cell again to install." in said
    assert psutil.wait_procs([child], timeout=30)[1] == []
