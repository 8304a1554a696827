"""The first cell of a run's notebook: it installs the host's wheel beside what a platform brings."""

from __future__ import annotations

import ast
import ensurepip
import functools
import hashlib
import http.server
import os
import re
import signal
import socketserver
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import psutil
import pytest
from packaging.version import Version

from tests.installed import Installed
from tests.small_wheels import Platform, make_wheel
from tests.waiting import wait_until
from volunteer_kit.host import install_cell
from volunteer_kit.installer import why_in_words

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
    wait_until(lambda: started.exists() and started.read_text().strip(), 120)
    child = psutil.Process(int(started.read_text()))
    cell.send_signal(signal.SIGINT)
    _, said = cell.communicate(timeout=120)
    assert "Stopped. Run this cell again to install." in said
    assert psutil.wait_procs([child], timeout=120)[1] == []


# --- the time-out, and how pip is stopped ---


def pip_that(platform: Platform, code: str) -> None:
    """In place of the platform's pip; its modules stay."""
    (platform.site / "pip/__main__.py").write_text(f"import os, signal, sys, time\nfrom pathlib import Path\n{code}")


def test_a_search_without_end_is_stopped_in_words_of_its_own_and_not_begun_again(make_platform, served, tmp_path):
    platform = make_platform({"numpy": "1.0"})
    calls = tmp_path / "calls"
    pip_that(platform, f"open({str(calls)!r}, 'a').write('call ')\nprint('Collecting x', flush=True)\ntime.sleep(600)")
    folder, url = served
    wheel = make_wheel(folder, "volunteer-kit", "0.3.0", [], KIT)
    script = Path(filled(tmp_path, wheel, [f"{url}/{wheel.name}"]))
    script.write_text(re.sub(r"(?m)^RESOLVE_SECONDS = \d+", "RESOLVE_SECONDS = 9", script.read_text()))
    done = platform.run(str(script))
    assert done.returncode != 0 and "pip searched for versions that fit" in done.stdout
    assert "No set of versions fits" not in done.stdout and "do not fit" not in done.stdout
    assert calls.read_text() == "call "


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("", True),
        ("Collecting torch", True),
        ("  Using cached numpy-2.0-cp312.whl.metadata (62 kB)", True),
        ("  Downloading numpy-2.0-cp312.whl.metadata (62 kB)", True),
        ("INFO: pip is looking at multiple versions of datasets to determine which version is compatible", True),
        ("  Preparing metadata (pyproject.toml): finished with status 'done'", True),
        ("  Downloading torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl (900.1 MB)", False),
        ("  Downloading torch-2.13.0.whl (900.1 MB)\nWARNING: Connection timed out while downloading.", False),
        ("  Preparing metadata (pyproject.toml): started", False),
        ("  Building wheel for hivemind (pyproject.toml): still running...", False),
        ("Installing collected packages: torch, hivemind", False),
    ],
)
def test_only_the_search_counts(line, counts):
    search, log = install_cell.SearchTime(), f"Collecting kit\n{line}\n"
    search.add(log, 100.0)
    assert search.add(log, 160.0) == (60.0 if counts else 0.0)
    assert search.add(log + "Collecting einops\n", 170.0) == (70.0 if counts else 10.0)


CLEANS_UP = """
def clean(*_):
    Path({cleaned!r}).touch()
    sys.exit(1)
signal.signal(signal.SIGINT, clean)
Path({begun!r}).touch()
for _ in range(6000):  # a signal that comes just before a sleep begins is heard when that is over
    time.sleep(0.1)
"""


@pytest.mark.parametrize("through", ["cell", "setup"])
def test_a_pip_that_is_stopped_gets_time_to_clean_up(tmp_path, through):
    stub, cleaned, begun = tmp_path / "stub", tmp_path / "cleaned", tmp_path / "begun"
    (stub / "pip").mkdir(parents=True)
    (stub / "pip/__init__.py").touch()
    (stub / "pip/__main__.py").write_text(
        "import signal, sys, time\nfrom pathlib import Path\n"
        + CLEANS_UP.format(cleaned=str(cleaned), begun=str(begun))
    )
    call = {
        "cell": "from volunteer_kit.host.install_cell import run_pip; "
                f"run_pip(['install'], 'x', Path({str(tmp_path)!r}), 0)",
        "setup": "from volunteer_kit import packages, installer; packages.lacking = lambda *_, **__: "
                 "[packages.Lack('x', packages.UPSTREAM[0])]; installer.set_up()",
    }[through]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": f"{stub}:{CELL.parents[2]}"}
    process = subprocess.Popen(
        [sys.executable, "-c", f"from pathlib import Path; {call}"], env=environment, cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(begun.exists, 120)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode != 0 and cleaned.exists()
    assert "Stopped. " in said and "KeyboardInterrupt" not in said


def test_a_pip_that_replaces_files_may_end(tmp_path):
    """Real pips do not put a package back that they have removed when an interrupt comes."""
    stub, go, replaced = tmp_path / "stub", tmp_path / "go", tmp_path / "replaced"
    (stub / "pip").mkdir(parents=True)
    (stub / "pip/__init__.py").touch()
    (stub / "pip/__main__.py").write_text(
        "import time\nfrom pathlib import Path\nprint('Installing collected packages: torch', flush=True)\n"
        f"while not Path({str(go)!r}).exists(): time.sleep(0.05)\nPath({str(replaced)!r}).touch()\n"
    )
    call = (
        "from pathlib import Path; from volunteer_kit.host.install_cell import run_pip; "
        f"run_pip(['install'], 'x', Path({str(tmp_path)!r}), 0)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", call], env={**os.environ, "PYTHONPATH": f"{stub}:{CELL.parents[2]}"}, cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as cell:  # fmt: skip
        log = tmp_path / "pip.log"
        wait_until(lambda: log.exists() and "Installing" in log.read_text(), 120)
        cell.send_signal(signal.SIGINT)
        wait_until(lambda: "is replacing files" in cell.stdout.readline(), 120)
        go.touch()
        said, _ = cell.communicate(timeout=120)
    assert replaced.exists() and "Stopped. Run this cell again" in said


# --- a kernel that holds old modules ---

TWICE = """
import runpy
for number in 1, 2, 3:
    try:
        runpy.run_path({cell!r}, run_name="__main__")
    except Exception as error:
        print(f"<{{number}}:", error, ">")
    else:
        print(f"<{{number}}: fine>")
"""


def test_each_later_call_in_the_kernel_asks_for_a_restart_too(make_platform, served, tmp_path):
    platform = make_platform({"numpy": "1.0"})
    make_wheel(platform.index, "numpy", "2.0")
    folder, url = served
    wheel = make_wheel(folder, "volunteer-kit", "0.3.0", ["numpy>=2"], KIT)
    platform.run("-m", "pip", "install", str(make_wheel(tmp_path / "old", "volunteer-kit", "0.2.0", [], KIT)))
    cell = filled(tmp_path, wheel, [f"{url}/{wheel.name}"])
    done = platform.run("-c", "import numpy, volunteer_kit" + TWICE.format(cell=cell))
    for number in (1, 2, 3):
        assert re.search(rf"<{number}: .*still holds the old numpy, volunteer_kit", done.stdout), done.stdout
    assert "<1: fine>" in platform.run("-c", "import numpy" + TWICE.format(cell=cell)).stdout


def test_a_restart_is_due_after_a_call_that_failed_half_way(make_platform, served, tmp_path):
    platform = make_platform({"numpy": "1.0"})
    make_wheel(platform.index, "numpy", "2.0")
    (platform.index / "dalle_pytorch-1.6.6-py3-none-any.whl").rename(tmp_path / "away.whl")
    folder, url = served
    wheel = make_wheel(folder, "volunteer-kit", "0.3.0", ["numpy>=2"], KIT)
    there = str(platform.index / "dalle_pytorch-1.6.6-py3-none-any.whl")
    back = f"import os; os.rename({str(tmp_path / 'away.whl')!r}, {there!r})"
    loop = TWICE.format(cell=filled(tmp_path, wheel, [f"{url}/{wheel.name}"]))
    loop += f"    if number == 1: {back}\n"
    done = platform.run("-c", "import numpy" + loop)
    assert "<1: \nThe kit could not be installed" in done.stdout, done.stdout
    for number in (2, 3):
        assert re.search(rf"<{number}: .*still holds the old numpy", done.stdout), done.stdout


# --- what is said to be ready is what an import finds ---


def test_pips_settings_do_not_lead_the_kit_elsewhere(make_platform, served, tmp_path):
    platform = make_platform({})
    folder, url = served
    wheel = make_wheel(folder, "volunteer-kit", "0.3.0", [], KIT)
    elsewhere = {f"PIP_{name}": str(tmp_path / name) for name in ("TARGET", "ROOT")}
    done = platform.run(filled(tmp_path, wheel, [f"{url}/{wheel.name}"]), **elsewhere, PIP_REQUIRE_HASHES="1",
                        PIP_DRY_RUN="1", PIP_USER="1")  # fmt: skip
    assert done.returncode == 0 and "volunteer_kit 0.3.0 is ready" in done.stdout, done.stdout
    assert (platform.site / "volunteer_kit/say.py").exists()
    assert not any(Path(place).exists() for place in elsewhere.values())


def test_a_kit_in_the_users_new_folder_comes_before_the_platforms_older_one(served, tmp_path):
    """JupyterHub: the site-packages are not the user's, and the kernel began before a folder of the user's existed."""
    folder, url = served
    old = make_wheel(tmp_path / "old", "volunteer-kit", "0.0.9", [], {**KIT, "volunteer_kit/say.py": "1 / 0\n"})
    hub = Installed(tmp_path / "hub", old, only={"pip"}, base=True)
    index = tmp_path / "index"
    for name, version in PINNED.items():
        make_wheel(index, name, version)
    wheel = make_wheel(folder, "volunteer-kit", "0.3.0", [], KIT)
    cell = filled(tmp_path, wheel, [f"{url}/{wheel.name}"])
    code = f"import runpy; runpy.run_path({cell!r}, run_name='__main__'); import volunteer_kit.say"
    done = hub.code(code, PIP_USER="1", PIP_FIND_LINKS=str(index), PIP_BREAK_SYSTEM_PACKAGES="1")
    assert "volunteer_kit 0.3.0 is ready" in done.stdout, (done.stdout, done.stderr)
    assert "the kit says hello" in done.stdout and (hub.site / "volunteer_kit").is_dir()


def test_a_kit_that_hides_the_installed_one_is_named(make_platform, served, tmp_path):
    platform = make_platform({})
    folder, url = served
    wheel = make_wheel(folder, "volunteer-kit", "0.3.0", [], KIT)
    (tmp_path / "mine/volunteer_kit").mkdir(parents=True)
    (tmp_path / "mine/volunteer_kit/__init__.py").touch()
    script = filled(tmp_path, wheel, [f"{url}/{wheel.name}"])
    for _ in range(2):  # the second finds it installed
        done = platform.run(script, PYTHONPATH=str(tmp_path / "mine"))
        assert done.returncode != 0 and "is ready" not in done.stdout and "run the next cell" not in done.stdout
        assert f"installed: {platform.site}" in done.stdout and f"found by import: {tmp_path / 'mine'}" in done.stdout


# --- packages that are half there, or odd ---


def test_half_of_a_removed_package_constrains_nothing(make_platform, served, tmp_path):
    """As a pip leaves it that was killed: the old version's folder, renamed."""
    platform = make_platform({"torch": "2.0"})
    (platform.site / "~orch-1.0.dist-info").mkdir()
    (platform.site / "~orch-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    make_wheel(platform.index, "torch", "1.0")
    make_wheel(platform.index, "torch", "2.0")
    folder, url = served
    wheel = make_wheel(folder, "volunteer-kit", "0.3.0", ["torch"], KIT)
    script = filled(tmp_path, wheel, [f"{url}/{wheel.name}"])
    first = platform.run("-c", f"import runpy; print(runpy.run_path({str(CELL)!r})['installed_versions']()['torch'])")
    assert first.stdout.strip() == "2.0"
    done = platform.run(script)
    assert done.returncode == 0, done.stdout
    assert "Changed" not in done.stdout
    assert "2.0" in platform.run("-c", "import importlib.metadata as m; print(m.version('torch'))").stdout


def test_a_package_with_unreadable_metadata_is_left_out_and_named_where_pip_fails_on_it(monkeypatch, tmp_path):
    (tmp_path / "latin-1.0.dist-info").mkdir()
    (tmp_path / "latin-1.0.dist-info/METADATA").write_bytes(b"Name: latin\nVersion: 1.0\nAuthor: J\xf6rg\n")
    make_wheel(tmp_path, "other", "1.0")
    with zipfile.ZipFile(tmp_path / "other-1.0-py3-none-any.whl") as wheel:
        wheel.extractall(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = install_cell.installed_versions()
    assert "latin" not in found and found["other"] == "1.0" and install_cell.installed_version("latin") is None
    text = install_cell.explained("ERROR: Exception:\nTraceback\nUnicodeDecodeError: 'utf-8' codec can't decode byte")
    assert str(tmp_path / "latin-1.0.dist-info") in text and "other-1.0" not in text
    assert str(tmp_path / "latin-1.0.dist-info") in why_in_words("ERROR: Exception:\nUnicodeDecodeError: ", ["x"])


def test_a_version_that_pip_does_not_understand_is_no_constraint():
    found = install_cell.constraint_lines({"a": "1.1build1", "b": "0.1.43ubuntu1", "torch": "2.11.0+cu128"})
    assert found == ["torch==2.11.0+cu128"]


# --- downloads that fail ---


@pytest.fixture
def answering():
    """(answers: path -> list of raw bytes, one for each request, the last one for all others; the address)."""
    answers = {}

    class Raw(socketserver.StreamRequestHandler):
        def handle(self):
            path = self.rfile.readline().split()[1].decode()
            while self.rfile.readline().strip():
                pass
            left = answers[path]
            self.wfile.write(left.pop(0) if len(left) > 1 else left[0])

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Raw) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield answers, f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def ok(body: bytes, length: int | None = None, more: str = "") -> bytes:
    given = "" if length == -1 else f"Content-Length: {len(body) if length is None else length}\r\n"
    return f"HTTP/1.1 200 OK\r\nConnection: close\r\n{given}{more}\r\n".encode() + body


NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
PAGE = b"<html>Log in to the airport's network</html>"


def test_a_download_that_breaks_off_is_tried_once_more(answering, tmp_path):
    answers, url = answering
    data = make_wheel(tmp_path, "volunteer-kit", "0.3.0", [], KIT).read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    chunked = ok(b"%x\r\n" % len(data) + data[:9], -1, "Transfer-Encoding: chunked\r\n")
    for broken in (ok(data[:50], len(data)), chunked, ok(data[:50], -1)):
        answers["/kit.whl"] = [broken, ok(data)]
        assert install_cell.download([f"{url}/kit.whl"], digest) == data
        answers["/kit.whl"] = [broken]
        with pytest.raises(install_cell.NotInstalled, match="broken off") as caught:
            install_cell.download([f"{url}/kit.whl"], digest)
        assert "newer version" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "hub", "words"),
    [
        (ok(PAGE), None, "not a wheel; a login page?"),
        (b"what is this\r\n\r\n", None, "does not answer"),
        (None, NOT_FOUND, "does not answer"),
        (NOT_FOUND, None, "newer version"),
        (NOT_FOUND, ok(PAGE), "newer version"),
        (ok(PAGE), NOT_FOUND, "login"),
    ],
)
def test_only_the_hosts_own_answer_tells_of_a_newer_version(answering, host, hub, words):
    answers, url = answering
    answers.update({"/host.whl": [host], "/hub.whl": [hub]})
    urls = [f"{url}/host.whl" if host else "http://127.0.0.1:9/gone.whl", *([f"{url}/hub.whl"] if hub else [])]
    with pytest.raises(install_cell.NotInstalled, match=re.escape(words)) as caught:
        install_cell.download(urls, "0" * 64)
    assert ("newer version" in str(caught.value)) == (words == "newer version")


# --- pip's verdict ---

RETRIED = (
    "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(...)': /simple/numpy/\n"
    "Collecting numpy\n"
)
NO_SUCH = "ERROR: Could not find a version that satisfies the requirement x (from versions: none)\n" \
          "ERROR: No matching distribution found for x\n"  # fmt: skip


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (RETRIED + "ERROR: Cannot install a and b because these package versions have conflicting dependencies.\n"
                   "ERROR: ResolutionImpossible: for help visit", "conflict"),
        (RETRIED + NO_SUCH, "offline"),
        (NO_SUCH, "absent"),
        *((f"Collecting x\nERROR: Exception:\nTraceback:\npip._vendor.{error}", "offline") for error in
          ("ReadTimeoutError: Read timed out.", "ProxyError('Cannot connect to proxy.')", "SSLError(1, 'x')",
           "ProtocolError: Connection reset by peer", "X: [Errno 111] Connection refused")),
        ("WARNING: The folder /root/.cache/pip: Permission denied\nERROR: ResolutionImpossible", "conflict"),
        (RETRIED + "ERROR: something new", "offline"),
        ("error: externally-managed-environment", "managed"),
    ],
)  # fmt: skip
def test_errors_decide_and_warnings_only_about_the_network(log, reason):
    assert install_cell.reason_of(log) == reason
