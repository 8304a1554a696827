"""The installed wheel where packages are missing: every verb says so before it starts anything, `setup` mends it."""

from __future__ import annotations

import re

import pytest

from tests.installed import UPSTREAM, Installed, build_wheel, stand_in, stand_ins, with_what_they_need
from volunteer_kit import packages

SERVER = {packages.name_of(line) for line in packages.requirements("server")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def volunteer(wheel, tmp_path_factory):
    """All packages but those that only `setup` brings, and a host's."""
    return Installed(tmp_path_factory.mktemp("volunteer"), wheel, without={*UPSTREAM, *SERVER})


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """The packages that read the command line, and nothing else: no torch, no hivemind, no requests."""
    only = with_what_they_need("pip", "typer", "rich")
    return Installed(tmp_path_factory.mktemp("bare"), wheel, only=only)


def refused(done, *words: str) -> None:
    """One message for a person, and the exit code of a missing package."""
    assert done.returncode == packages.EXIT_CODE, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["join", "demo", "--accept-terms", "--new-swarm"],
        ["demo", "--minutes", "0.1"],
        ["generate", "a large red circle", "--checkpoint", "model"],
        ["convert", "vqgan.ckpt", "vqgan-f8-8192"],
        ["monitor", "demo"],
    ],
    ids=lambda words: words[0],
)
def test_a_verb_names_setup_before_it_starts_anything(volunteer, words):
    done = volunteer.kit(*words, VOLUNTEER_KIT_HOME="home")
    refused(done, "'dalle-pytorch', 'taming-transformers-rom1504'", "volunteer-kit setup\n", packages.UPSTREAM_LINE)
    assert done.stdout == "" and volunteer.left() == []


@pytest.mark.parametrize("words", [["host", "demo"], ["authority", "demo"], ["dashboard", "demo"]], ids=lambda w: w[0])
def test_a_hosts_verb_names_its_own_packages(volunteer, words):
    refused(volunteer.kit(*words), "'fastapi'", "'uvicorn'", "'sqlalchemy'", "volunteer-kit setup host\n")
    assert volunteer.left() == []


def test_doctor_names_what_a_volunteer_and_what_a_host_lacks(volunteer):
    done = volunteer.kit("doctor", "demo")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    (own,) = [number for number, line in enumerate(lines) if line.startswith("problem  packages")]
    assert "missing: dalle-pytorch, taming-transformers-rom1504" in lines[own]
    assert lines[own + 1].endswith("volunteer-kit setup") and packages.UPSTREAM_LINE in lines[own + 2]
    (hosts,) = [number for number, line in enumerate(lines) if line.startswith("ok       host packages")]
    assert "only a host needs them: missing: fastapi" in lines[hosts]
    assert lines[hosts + 1].endswith("volunteer-kit setup host")
    assert lines[-1] == "To be mended first: packages."


def test_doctor_lives_without_any_package(bare):
    done = bare.kit("doctor", "demo")
    assert done.returncode == 1 and done.stderr == ""
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("problem  packages")]
    for name in ("torch", "hivemind", "numpy", "requests", "packaging", "pyyaml", "dalle-pytorch"):
        assert re.search(rf"[ ,]{name}(,|$)", line), line


def test_python_is_told_the_same_without_torch(bare):
    done = bare.code("from volunteer_kit import join_swarm, run_demo")
    assert "volunteer_kit.packages.MissingDependency: Packages are not installed: 'torch', 'numpy'" in done.stderr
    assert "volunteer-kit setup\n" in done.stderr and "ModuleNotFoundError" not in done.stderr


def test_setup_works_without_what_reads_command_lines(wheel, tmp_path):
    nothing = Installed(tmp_path, wheel, only={"pip"})
    refused(nothing.kit("--help"), "'typer'", "volunteer-kit setup\n")
    done = nothing.kit("setup")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "No package index could be reached" in done.stderr


def test_setup_brings_what_is_lacking_and_then_has_nothing_to_do(wheel, tmp_path):
    one = Installed(tmp_path, wheel, without=UPSTREAM)
    done = one.kit("setup", PIP_FIND_LINKS=str(stand_ins(tmp_path / "wheels")))
    assert done.returncode == 0, done.stderr
    assert f"Installing into the virtual environment {tmp_path / 'env'}" in done.stdout
    assert "Installed: dalle-pytorch 1.6.6, taming-transformers-rom1504 0.0.6.\n" in done.stdout
    assert (one.site / "dalle_pytorch").is_dir() and "Changed" not in done.stdout
    again = one.kit("setup")
    assert again.returncode == 0 and again.stdout.startswith(
        "Nothing to do: all packages are there, dalle-pytorch 1.6.6"
    )
    assert one.code("from volunteer_kit import packages; packages.require('train', 'notebook', 'host')").returncode == 0


def test_setup_brings_a_listed_package_too_and_changes_no_other(wheel, tmp_path):
    """`pip install --no-deps KIT`, or a package that somebody removed."""
    one = Installed(tmp_path, wheel, without={"braceexpand"})
    refused(one.kit("join", "demo"), "'braceexpand' is not installed", "volunteer-kit setup\n")
    wheels = stand_ins(tmp_path / "wheels", braceexpand="0.1.7")
    done = one.kit("setup", PIP_FIND_LINKS=str(wheels))
    assert done.returncode == 0, done.stderr
    assert "Installed: braceexpand 0.1.7.\n" in done.stdout and "Changed" not in done.stdout


def test_odd_packages_beside_it_keep_setup_from_nothing(wheel, tmp_path):
    """A system's own, in a folder beside pip's: versions that are none to pip, and half of a removed package."""
    one = Installed(tmp_path, wheel, without={"braceexpand"})
    (one.site / "system.pth").write_text(str(tmp_path / "system"))
    for folder, name in {
        "distro_info-1.1build1": "distro-info", "ufw-0.1.43ubuntu1": "ufw", "~orch-1.0": "torch"
    }.items():  # fmt: skip
        place = tmp_path / "system" / f"{folder}.dist-info"
        place.mkdir(parents=True)
        version = folder.partition("-")[2]
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    wheels = stand_ins(tmp_path / "wheels", braceexpand="0.1.7")
    elsewhere = {"PIP_TARGET": str(tmp_path / "target"), "PIP_DRY_RUN": "1", "PIP_USER": "1"}
    done = one.kit("setup", PIP_FIND_LINKS=str(wheels), **elsewhere)
    assert done.returncode == 0, done.stderr
    assert "Installed: braceexpand 0.1.7.\n" in done.stdout and "cannot stay" not in done.stdout
    assert not (tmp_path / "target").exists()


def test_setup_brings_everything_and_tells_what_had_to_change(wheel, tmp_path):
    """As after `pip install --no-deps KIT`, beside packages of the platform's: one too old, one in another's way."""
    one, wheels = Installed(tmp_path, wheel, only={"pip"}), tmp_path / "wheels"
    stand_ins(wheels)
    for line in packages.requirements():
        name, least = packages.name_of(line), re.search(r">=([\d.]+)", line)[1]
        needs = ["click>=8"] if name == "typer" else []
        stand_in(wheels, name, least, packages.module_of(name), *needs)
    stand_in(wheels, "click", "8.1", "click")
    for name, version in (("einops", "0.7"), ("click", "7.0"), ("other", "1.0")):
        stand_in(tmp_path, name, version, name)
        installed = one.pip("install", "-q", str(tmp_path / f"{name}-{version}-py3-none-any.whl"))
        assert installed.returncode == 0, installed.stderr
    done = one.kit("setup", PIP_FIND_LINKS=str(wheels))
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "cannot stay as they are" in done.stdout
    assert "Changed: click 7.0 -> 8.1, einops 0.7 -> 0.8." in done.stdout and "torch 2.5" in done.stdout
    assert one.kit("setup").stdout.startswith("Nothing to do")


def test_a_fine_tune_names_its_own_packages(wheel, tmp_path):
    one = Installed(tmp_path, wheel, without={"peft", "accelerate"})
    done = one.code("from volunteer_kit import swarm_trainer")
    assert "MissingDependency: " in done.stderr and "'accelerate'" in done.stderr
    assert "volunteer-kit setup finetune\n" in done.stderr


def test_setup_says_what_to_do_without_a_network(volunteer):
    done = volunteer.kit("setup")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "No package index could be reached" in done.stderr and "HTTPS_PROXY" in done.stderr
    assert f"pip download --no-deps -d packages {' '.join(packages.UPSTREAM)}" in done.stderr
    assert "PIP_NO_INDEX=1 PIP_FIND_LINKS=packages volunteer-kit setup\n" in done.stderr
    hosts = volunteer.kit("setup", "host")
    assert hosts.returncode == 2 and "cannot stay as they are" not in hosts.stdout
    assert "PIP_FIND_LINKS=packages volunteer-kit setup host\n" in hosts.stderr


def test_setup_knows_what_it_can_be_asked_for(volunteer):
    done = volunteer.kit("setup", "hots")
    assert done.returncode == 2 and "no 'hots' to set up" in done.stderr and "host, finetune" in done.stderr


def test_a_systems_python_is_left_alone(wheel, tmp_path):
    """PEP 668, with a pip that means it."""
    system = Installed(tmp_path, wheel, without=UPSTREAM, base=True)
    system.mark_as_the_systems()
    wheels = str(stand_ins(tmp_path / "wheels"))
    done = system.kit("setup", PIP_FIND_LINKS=wheels)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "belongs to the system" in done.stderr and "python3 -m venv" in done.stderr
    assert not (system.site / "dalle_pytorch").exists()
    allowed = system.kit("setup", PIP_FIND_LINKS=wheels, PIP_BREAK_SYSTEM_PACKAGES="1")
    assert allowed.returncode == 0 and (system.site / "dalle_pytorch").is_dir(), allowed.stderr


def test_a_users_own_kit_gets_its_packages_beside_it(wheel, tmp_path):
    mine = Installed(tmp_path, wheel, without=UPSTREAM, base=True, user=True)
    done = mine.kit("setup", PIP_FIND_LINKS=str(stand_ins(tmp_path / "wheels")))
    assert done.returncode == 0, done.stderr
    assert "your own packages" in done.stdout and list((tmp_path / "user").glob("lib/*/site-packages/dalle_pytorch"))
    assert not (mine.site / "dalle_pytorch").exists()


def test_the_notebooks_come_with_the_wheel(bare, wheel):
    written = bare.folder / "cwd" / "join.ipynb"
    done = bare.kit("notebook", "join")
    assert done.returncode == 0 and "Written: join.ipynb" in done.stdout, done.stderr
    assert '"nbformat"' in written.read_text()
    assert bare.kit("notebook", "join").returncode == 0  # the same once more
    written.write_text("{}")
    refusal = bare.kit("notebook", "join")
    assert refusal.returncode == 2 and "--out FILE" in refusal.stderr and written.read_text() == "{}"
    assert bare.kit("notebook", "join", "--out", "mine.ipynb").returncode == 0
    unknown = bare.kit("notebook", "jion")
    assert unknown.returncode == 2 and "finetune_with_trainer, gallery, host_a_run, join" in unknown.stderr
    written.unlink(), (bare.folder / "cwd" / "mine.ipynb").unlink()
