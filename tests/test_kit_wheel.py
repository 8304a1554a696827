"""The wheel that a host makes of its own kit: right, the same bytes each time, and installable."""

from __future__ import annotations

import base64
import csv
import email
import hashlib
import json
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import volunteer_kit
from volunteer_kit.host import kit_wheel
from volunteer_kit.host.kit_wheel import make_wheel

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return make_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def members(wheel) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel.path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def info(members: dict[str, bytes], name: str) -> bytes:
    return members[f"volunteer_kit-{volunteer_kit.__version__}.dist-info/{name}"]


def test_equal_files_give_equal_bytes(wheel, tmp_path):
    assert make_wheel(tmp_path) == wheel._replace(path=tmp_path / wheel.path.name)
    assert wheel.sha256 == hashlib.sha256(wheel.path.read_bytes()).hexdigest()
    assert wheel.path.name == f"volunteer_kit-{wheel.version}-py3-none-any.whl"


def test_what_is_there_and_good_stays_and_what_is_damaged_does_not(wheel, tmp_path):
    made = make_wheel(tmp_path)
    before = made.path.stat().st_mtime_ns
    assert make_wheel(tmp_path) == made and made.path.stat().st_mtime_ns == before
    made.path.write_bytes(made.path.read_bytes()[:5000])
    assert make_wheel(tmp_path).sha256 == wheel.sha256


def test_record_names_every_file_with_its_hash(members):
    rows = {name: (digest, size) for name, digest, size in csv.reader(info(members, "RECORD").decode().splitlines())}
    assert rows.keys() == members.keys()
    for name, content in members.items():
        if not name.endswith("/RECORD"):
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert rows[name] == (f"sha256={digest}", str(len(content))), name


def test_it_holds_what_the_kit_needs_and_nothing_of_a_workplace(members):
    names = {name.removeprefix("volunteer_kit/") for name in members}
    needed = "__init__.py cli.py run_files/demo.yaml notebooks/join.ipynb host/install_cell.py dashboard/static/page.js"
    needed += " dashboard/templates/landing.html auth/authority/static/style.css model/weights/scenes32.safetensors"
    assert set(needed.split()) <= names
    assert not [name for name in members if "__pycache__" in name or name.endswith((".pyc", "~")) or "/." in name]


def test_a_host_that_runs_inside_the_package_keeps_its_keys(wheel, tmp_path, monkeypatch):
    """A notebook of the checkout puts a host's folder beside itself, and the package has a link to that folder."""
    copy = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("__pycache__")  # others may write there just now
    shutil.copytree(ROOT / "volunteer_kit", copy / "volunteer_kit", symlinks=True, ignore=ignored)
    for name in ("setup.cfg", "requirements.txt", "LICENSE", "notebooks"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
    for secret in ("notebooks/my-run-host/keys/root.pem", "notebooks/first-peer.key", "notebooks/host.log",
                   "notebooks/my-run-host/host.json", "volunteer_kit/my-run-host/identity.key",
                   "volunteer_kit/dashboard/token.txt", "volunteer_kit/host/host.sqlite"):  # fmt: skip
        (copy / secret).parent.mkdir(parents=True, exist_ok=True)
        (copy / secret).write_text("a secret")
    monkeypatch.setattr(kit_wheel, "PACKAGE", copy / "volunteer_kit")
    assert make_wheel(tmp_path / "out").sha256 == wheel.sha256


def test_its_metadata_is_the_checkouts(members):
    metadata = email.message_from_bytes(info(members, "METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("volunteer-kit", volunteer_kit.__version__)
    required = metadata.get_all("Requires-Dist")
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            assert line.partition(" #")[0].strip() in required
    assert 'fastapi>=0.110; extra == "server"' in required and "server" in metadata.get_all("Provides-Extra")
    assert b"volunteer-kit = volunteer_kit." in info(members, "entry_points.txt")
    assert metadata["Requires-Python"] == ">=3.10"


def test_the_requirements_can_be_read(members, tmp_path):
    from packaging.requirements import Requirement

    metadata = email.message_from_bytes(info(members, "METADATA"))
    found = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    assert {"torch", "hivemind", "typer"} <= {one.name for one in found if one.marker is None}
    assert all(one.marker is None or "extra" in str(one.marker) for one in found)


def test_a_package_without_metadata_is_told(monkeypatch, tmp_path):
    (tmp_path / "volunteer_kit").mkdir()
    monkeypatch.setattr(kit_wheel, "PACKAGE", tmp_path / "volunteer_kit")
    with pytest.raises(volunteer_kit.HostError, match="pip install"):
        make_wheel(tmp_path / "out")


@pytest.mark.slow
def test_pip_installs_it_and_the_installed_kit_makes_the_same_wheel(wheel, tmp_path):
    """The new environment reaches this one's packages, and no checkout."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    pinned = f"{wheel.path.as_uri()}#sha256={wheel.sha256}"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", pinned], check=True, timeout=300)
    (site,) = (tmp_path / "env").glob("lib/*/site-packages")
    others = [str(Path(path)) for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others) + "\n")
    code = (
        "import json, sys, volunteer_kit\nfrom pathlib import Path\n"
        "from volunteer_kit.host.kit_wheel import make_wheel\n"
        "made = make_wheel(Path(sys.argv[1]))\nprint(json.dumps([made.sha256, volunteer_kit.__file__]))"
    )
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [python, "-c", code, tmp_path / "again"], capture_output=True, text=True, timeout=300, cwd=tmp_path, env=clean
    )
    assert done.returncode == 0, done.stderr
    sha256, file = json.loads(done.stdout)
    assert Path(file).is_relative_to(tmp_path) and sha256 == wheel.sha256
    version = subprocess.run(
        [tmp_path / "env" / "bin" / "volunteer-kit", "--version"], capture_output=True, text=True, cwd=tmp_path,
        env=clean, timeout=300,
    )  # fmt: skip
    assert version.stdout.strip() == f"volunteer-kit {wheel.version}", version.stderr
