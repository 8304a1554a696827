"""Users without a home folder, and folders that nobody else may write."""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from volunteer_kit.cli import explained
from volunteer_kit.doctor import process
from volunteer_kit.home import Home
from volunteer_kit.host.folder import HostFolder
from volunteer_kit.host.service import service_unit
from volunteer_kit.run_reader import find_run_file
from volunteer_kit.storage import places
from volunteer_kit.storage.places import NoHome, adopt_home, has_home, kit_folder


@pytest.fixture
def nobody(monkeypatch):
    """A container's user: no HOME, no name, no entry in the list of users."""
    for name in ("HOME", "VOLUNTEER_KIT_HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(os, "environ", os.environ)
    yield
    for name in ("HOME", "LOGNAME"):
        os.environ.pop(name, None)


def test_a_folder_that_is_named_suffices(nobody, tmp_path):
    home = Home(tmp_path / "here", "demo", "0" * 8)
    assert home.lock() and home.tuned.is_relative_to(tmp_path) and not has_home()
    assert adopt_home(tmp_path) and not adopt_home(tmp_path / "another") and has_home()
    assert Path.home() == tmp_path and kit_folder().is_relative_to(tmp_path)
    assert os.path.expanduser("~/.cache/huggingface").startswith(str(tmp_path)), "libraries' caches"
    assert "\nUser=12345\n" in service_unit("demo", [], folder=tmp_path)


@pytest.mark.parametrize("ask", [lambda: Home(None, "demo", "0" * 8), kit_folder, lambda: find_run_file("~/run.yaml")])
def test_without_one_the_error_names_it(nobody, ask):
    with pytest.raises(NoHome, match="--home FOLDER") as error:
        ask()
    assert "12345" in explained(error.value)


def test_the_variable_suffices_too(nobody, tmp_path, monkeypatch):
    monkeypatch.setenv("VOLUNTEER_KIT_HOME", str(tmp_path / "kit"))
    assert Home(None, "demo", "0" * 8).path.parent == tmp_path / "kit/runs"
    assert not adopt_home(None) or os.environ["HOME"] == str(tmp_path / "kit")


def test_a_home_that_is_there_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert has_home() and not adopt_home(tmp_path / "other") and os.environ["HOME"] == str(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "none"))
    assert not has_home(), "as docker run --user makes it"
    assert adopt_home(tmp_path) and os.environ["HOME"] == str(tmp_path)


def test_a_command_of_that_user_ends_in_words(tmp_path):
    program = """if True:
        import os, pwd, sys
        pwd.getpwuid, os.getuid = {}.__getitem__, lambda: 12345
        from volunteer_kit.cli import main
        sys.argv[1:] = ["join", "demo", "--new-swarm", "--accept-terms"]
        main()
    """
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd()}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True
    )
    assert ended.returncode == 2 and b"--home FOLDER" in ended.stderr and b"Traceback" not in ended.stderr
    assert os.listdir(tmp_path) == []


@pytest.fixture
def umask(monkeypatch):
    monkeypatch.setattr(places, "_umask_before", None)
    before = os.umask(0)
    yield
    os.umask(before)


def test_under_umask_000_nobody_else_writes_what_the_kit_makes(umask, tmp_path):
    host = HostFolder(tmp_path / "above" / "host")
    host.lock()
    assert Home(tmp_path / "home").lock()
    for folder in ("above", "above/host", "home"):
        assert not stat.S_IMODE((tmp_path / folder).stat().st_mode) & 0o022, folder
    places.keep_others_out()
    (tmp_path / "later").mkdir()
    assert not (tmp_path / "later").stat().st_mode & 0o022
    assert process.rights(places.umask(as_found=True), None).level == "warning"


def test_a_folder_that_is_open_to_everybody_is_shut(tmp_path):
    (tmp_path / "host").mkdir()
    (tmp_path / "host").chmod(0o777)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    for name in ("host", "shared"):
        assert Home(tmp_path / name).lock()
    assert stat.S_IMODE((tmp_path / "host").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o1777, "as /tmp: nobody removes another's files"


@pytest.mark.parametrize("mask", [0o002, 0o007, 0o022, 0o077])
def test_a_umask_that_was_chosen_stays(umask, mask):
    os.umask(mask)
    places.keep_others_out()
    assert places.umask() == mask and process.rights(mask, None).level == "ok"


def test_the_doctor_tells_of_terminal_home_and_rights(nobody, tmp_path):
    assert process.terminal("iso-8859-1").level == "warning" and process.terminal("utf-8").level == "ok"
    assert process.terminal(None).level == "ok"
    found = {finding.name: finding for finding in process.look(None)}
    assert found["home"].level == "problem" and "--home FOLDER" in found["home"].way_out
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o777)
    found = {finding.name: finding for finding in process.look(tmp_path / "home")}
    assert found["home"].level == "ok" and str(tmp_path) in found["home"].text
    assert found["rights"].way_out == f"chmod go-w {tmp_path / 'home'}"
