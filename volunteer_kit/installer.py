"""`volunteer-kit setup`: brings what packages.py finds lacking, by pip, into the Python that runs the kit.

Needs the standard library alone: it has to work where everything else is missing. Installed packages keep their
versions where pip finds a way, since a notebook's platform brings torch, numpy and protobuf that fit each other.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from volunteer_kit import output, packages
from volunteer_kit.packages import EXTRAS, KIT, UPSTREAM, Lack, name_of

OPTIONS = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")
SHOWN = 12  # lines of pip's own, where its failure has no known cause


def _load_install_cell() -> ModuleType:
    """The first cell of a run's notebook knows how to call pip. It is text that imports the standard library alone,
    and the package around it needs others: so it is loaded by its path.
    """
    path = Path(__file__).with_name("host") / "install_cell.py"
    spec = importlib.util.spec_from_file_location("_volunteer_kit_install_cell", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_cell = _load_install_cell()


class SetupError(OSError):
    """Packages could not be installed; the message says why and what to do.

    :ivar output: pip's own, if it was pip
    """

    output = ""


def set_up(purposes: Sequence[str] = (), *, say: Callable[[str], None] = output.say) -> bool:
    """Install what the kit lacks here for training, and for `purposes`.

    :param purposes: keys of packages.EXTRAS, or names of the kit's extras: host, finetune, metrics, tpu
    :returns: whether something was installed; False: all was there
    Raises SetupError.
    """
    wanted = ["demo", "notebook", *(_purpose(name) for name in purposes)]
    lacks = packages.lacking(*wanted, strict=True)
    if not lacks:
        there = ", ".join(f"{name_of(line)} {packages.version_of(name_of(line)) or ''}".strip() for line in UPSTREAM)
        say(f"Nothing to do: all packages are there, {there} among them.")
        return False
    before = _cell.installed_versions()
    say(f"Installing into {place()}: {', '.join(lack.line for lack in lacks)}")
    listed = [_fitting(lack) for lack in lacks if not lack.is_upstream]
    if listed:
        _install_listed(listed, before, say)
    if any(lack.is_upstream for lack in lacks):
        _pip("--no-deps", *UPSTREAM)  # both: it is one line, and the one that is there already costs nothing
    _cell.add_user_folder()  # this process began before the packages were there
    if left := packages.lacking(*wanted, strict=True):
        raise SetupError(
            f"pip has ended without an error, and this Python still lacks {', '.join(lack.line for lack in left)}.\n"
            f"1. See where pip installs: {_quoted(*_command(), '--version')}\n"
            f"2. Start the kit with that Python; this one is {sys.executable}"
        )
    _tell_changes(before, _cell.installed_versions(), say)
    return True


def place() -> str:
    """Where packages go, in words."""
    if is_user_install():
        return f"your own packages of {sys.executable} ({site.getusersitepackages()})"
    if sys.prefix != sys.base_prefix:
        return f"the virtual environment {sys.prefix}"
    return f"the packages of {sys.executable}"


def is_user_install() -> bool:
    """Whether the kit is one of this user's own packages, and not of an environment: so what it needs belongs there."""
    if sys.prefix != sys.base_prefix or not site.ENABLE_USER_SITE:
        return False
    return Path(site.getusersitepackages()).resolve() == packages.ROOT


def why_in_words(output: str, lines: Sequence[str], options: Sequence[str] = (), again: str = f"{KIT} setup") -> str:
    """The meaning of pip's failure, and what to do.

    :param lines: that it was to install
    :param again: the command to give once more
    """
    reason = _cell.reason_of(output)
    if reason == "managed":
        return (
            f"{sys.executable} belongs to the system, which lets pip change nothing in it (PEP 668).\n"
            "1. Make an environment of the kit's own: python3 -m venv ~/volunteer-kit\n"
            "2. Install the kit in it, by the line that you used, with ~/volunteer-kit/bin/python -m pip install ...\n"
            f"3. There: ~/volunteer-kit/bin/{again}\n"
            f"Or, at the risk of the system's own programs: PIP_BREAK_SYSTEM_PACKAGES=1 {again}"
        )
    if reason == "full":
        return f"The disk is full.\n1. Make room: df -h {sysconfig.get_path('purelib')}\n2. Again: {again}"
    if reason == "denied":
        return (
            f"{sysconfig.get_path('purelib')} cannot be written by this user.\n"
            "1. Make an environment of your own: python3 -m venv ~/volunteer-kit\n"
            "2. Install the kit in it, by the line that you used, with ~/volunteer-kit/bin/python -m pip install ...\n"
            f"3. There: ~/volunteer-kit/bin/{again}"
        )
    if reason in ("offline", "absent"):
        download = _quoted("python", "-m", "pip", "download", *options, "-d", "packages", *lines)
        return (
            "No package index could be reached, or it does not have what is needed.\n"
            "1. Look at the network (behind a proxy: export HTTPS_PROXY=http://HOST:PORT), and give the same command "
            "again.\n"
            f"2. Without a network: on a machine that has one, and the same system and Python {_python()}:\n"
            f"   {download}\n   Bring the folder here, then: PIP_NO_INDEX=1 PIP_FIND_LINKS=packages {again}"
        )
    if reason == "unreadable":
        folders = ", ".join(_cell.unreadable_folders())
        return (
            f"This pip cannot read the metadata of an installed package, since it is not UTF-8: {folders}\n"
            "1. Remove that folder, or install the package that it belongs to again by the way it came.\n"
            f"2. Again: {again}"
        )
    end = "\n".join(f"  | {line[:200]}" for line in output.strip().splitlines()[-SHOWN:])
    return f"pip could not install {', '.join(lines)}. It said at the end:\n{end}\n1. Mend that, and again: {again}"


# --- pip ---


def _fitting(lack: Lack) -> str:
    """torch_xla has to be of torch's own version, which its metadata do not say."""
    torch = packages.version_of("torch")
    if lack.name != "torch-xla" or torch is None:
        return lack.line
    return f"torch_xla[tpu]=={'.'.join(torch.split('+')[0].split('.')[:2])}.*"


def _install_listed(lines: Sequence[str], before: dict[str, str], say: Callable[[str], None]) -> None:
    """With all that is there as it is; where that cannot be, with torch and numpy as they are."""
    wrong = {name_of(line) for line in lines}
    kept = _cell.constraint_lines({name: version for name, version in before.items() if name not in wrong})
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("\n".join(kept))
        try:
            _pip("-c", str(constraints), *lines)
        except SetupError as error:
            if _cell.reason_of(error.output) != "conflict":
                raise
            few = [line for line in kept if name_of(line) in ("torch", "numpy")]
            constraints.write_text("\n".join(few))
            say("Some packages that are here cannot stay as they are; what changes is told.")
            _pip("-c", str(constraints), *lines)


def _pip(*arguments: str) -> None:
    """Raises SetupError, in words; also at an interrupt, which ends pip and gives it time to clean up."""
    words = sys.argv[1:] if sys.argv[1:2] == ["setup"] else ["setup"]
    again = _quoted(KIT, *words)
    process, is_pressed = _cell.start(
        [*_command(), *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", env=_cell.pip_environment(), start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            if is_pressed:
                raise KeyboardInterrupt
            output, _ = process.communicate()
        except KeyboardInterrupt:
            raise SetupError(f"Stopped. To install the rest: {again}") from None
        finally:
            _cell.stop(process)
    if process.returncode:
        options = [word for word in arguments if word == "--no-deps"]
        lines = [word for word in arguments if re.match(r"[A-Za-z0-9]", word)]
        error = SetupError(why_in_words(output, lines, options, again))
        error.output = output
        raise error


def _command() -> list[str]:
    """pip's, or uv's where the environment has no pip, as uv and pipx make them."""
    if importlib.util.find_spec("pip") is not None:
        user = ["--user"] if is_user_install() else []
        return [sys.executable, "-m", "pip", "install", *OPTIONS, *user]
    uv = shutil.which("uv")
    if uv:
        return [uv, "pip", "install", "--python", sys.executable]
    raise SetupError(
        f"{sys.executable} has no pip.\n"
        f"1. Give it one: {_quoted(sys.executable, '-m', 'ensurepip', '--upgrade')}\n"
        f"2. Where pipx made the environment: pipx inject {KIT} --pip-args=--no-deps {' '.join(UPSTREAM)}\n"
        f"3. Then again: {KIT} setup"
    )


def _tell_changes(before: dict[str, str], after: dict[str, str], say: Callable[[str], None]) -> None:
    new = [f"{name} {version}" for name, version in after.items() if name not in before]
    changed = [f"{name} {before[name]} -> {v}" for name, v in after.items() if before.get(name, v) != v]
    say(f"Installed: {', '.join(sorted(new)) or 'nothing new'}.")
    if changed:
        say(f"Changed: {', '.join(sorted(changed))}. In a notebook, restart the kernel.")
    say(f"All packages are there. To look at the rest of this machine: {KIT} doctor")


def _purpose(name: str) -> str:
    by_extra = {extra: purpose for purpose, extra in reversed(EXTRAS.items()) if extra}  # the first of each
    purpose = by_extra.get(name, name)
    if purpose not in EXTRAS:
        raise SetupError(
            f"There is no {name!r} to set up.\n1. For training nothing is named: {KIT} setup\n"
            f"2. Or one of these: {', '.join(one for one in EXTRAS if one in by_extra.values())}; {KIT} setup host"
        )
    return purpose


def _quoted(*words: str) -> str:
    return shlex.join(words)


def _python() -> str:
    return ".".join(map(str, sys.version_info[:2]))
