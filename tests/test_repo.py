"""What the repository promises outside its code: one install line, one list of packages, its floors, its wheel."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from volunteer_kit.packages import UPSTREAM_LINE

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def install_lines(path: Path) -> list[str]:
    """Every line that installs dalle-pytorch, from `pip` on."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    lines = [line for line in text.splitlines() if "dalle-pytorch==" in line]
    return [line[re.search(r"\bpip\b", line).start() :].strip() for line in lines]


@pytest.mark.parametrize("path", [ROOT / "Makefile", ROOT / "binder" / "postBuild"], ids=lambda path: path.name)
def test_the_one_line_for_dalle_pytorch_is_the_same_everywhere(path):
    assert set(install_lines(path)) == {UPSTREAM_LINE}


def test_the_readme_repeats_no_other_line():
    readme = ROOT / "README.md"
    assert not readme.exists() or set(install_lines(readme)) <= {UPSTREAM_LINE}


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.md")), ids=lambda path: path.name)
def test_every_relative_link_leads_somewhere(path):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing


def test_binder_takes_the_one_list_of_packages_and_the_pinned_torch():
    binder = (ROOT / "binder" / "requirements.txt").read_text()
    assert "-r ../requirements.txt" in binder
    pinned = re.search(r"torch==([\d.]+)", (ROOT / "Makefile").read_text()).group(1)
    assert f"torch=={pinned}+cpu" in binder


def test_torch_and_numpy_have_lower_bounds_only():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    for package in ("torch", "numpy"):
        (line,) = [line for line in lines if re.match(rf"{package}\W", line)]
        assert re.fullmatch(rf"{package}>=[\d.]+", line)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_hold_no_outputs(path):
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


def lint(folder: Path) -> subprocess.CompletedProcess:
    tool = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [tool, "--no-cache", "--no-logo"], cwd=folder, capture_output=True, text=True, timeout=120,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    folder = tmp_path_factory.mktemp("house")
    shutil.copy(ROOT / "setup.cfg", folder)
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(ROOT / "volunteer_kit", folder / "volunteer_kit", ignore=ignored)
    return folder


def test_the_floors_hold(house):
    done = lint(house)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("model/dalle.py", "import volunteer_kit.data.scenes"),
        ("optim/lamb.py", "from volunteer_kit import checkpoint"),
        ("training/protocol.py", "import volunteer_kit.model.dalle"),
        ("swarm/errors.py", "import volunteer_kit.optim.lamb"),
        ("swarm/net/dht.py", "import volunteer_kit.swarm.node.links"),
        ("swarm/sync/core.py", "import volunteer_kit.swarm.wire"),
        ("swarm/new_room.py", ""),
        ("runs.py", "import volunteer_kit.training.protocol"),
        ("volunteer.py", "import hivemind"),
        ("new_room.py", ""),
    ],
)
def test_a_breach_of_the_floors_is_found(house, room, line):
    path = house / "volunteer_kit" / room
    before = path.read_text() if path.exists() else None
    try:
        path.write_text((before or "") + f"\n{line}\n")
        done = lint(house)
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_text(before)
    assert done.returncode != 0
    assert (line.split()[-1].split(".")[-1] if line else "new_room") in done.stdout


def test_the_platforms_half_names_tests_that_exist():
    names = (ROOT / "tests/platforms/half.txt").read_text().splitlines()
    assert not [name for name in names if not name.startswith("#") and not (ROOT / "tests" / f"{name}.py").is_file()]


@pytest.mark.slow
def test_a_wheel_holds_the_run_files_and_the_weights(tmp_path):
    source = tmp_path / "source"
    ignored = (".git", ".venv*", "*.egg-info", "__pycache__", "build", "demo-out", ".hypothesis", ".*_cache")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*ignored))
    (source / "README.md").touch()
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source],
        check=True, timeout=280,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("volunteer_kit-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "volunteer_kit"
    shipped = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    missing = {str(path.relative_to(ROOT)) for path in shipped} - names
    assert not missing
    assert "volunteer_kit/run_files/demo.yaml" in names
    assert {f"volunteer_kit/notebooks/{path.name}" for path in NOTEBOOKS} <= names
