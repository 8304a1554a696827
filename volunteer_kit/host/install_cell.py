# @title Install volunteer_kit { display-mode: "form" }
WHEEL_URLS = []
SHA256 = ""
VERSION = ""
# The text of this file is the first cell of a run's join.ipynb; the host fills in the three lines above. It installs
# exactly the host's wheel, beside what the platform brings, and needs the standard library and pip alone.
# The notebooks of a checkout run the same code (prepare).
# ruff: noqa: E402

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import site
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

KIT = "volunteer-kit"
PINNED = ("dalle-pytorch==1.6.6", "taming-transformers-rom1504==0.0.6")  # --no-deps: their own lists do not install
MAX_WHEEL = 64 * 2**20  # bytes
RESOLVE_SECONDS = 900  # pip goes through old releases one by one where nothing fits
MAX_TRIES = 8  # packages that are pinned again one by one after a conflict


class NotInstalled(Exception):
    """Its lines are for the person; IPython shows them without a traceback."""

    def _render_traceback_(self):
        return str(self).splitlines()


def install(urls, sha256, version, extras=()):
    """Install the wheel with this SHA-256 from the first address that has it.

    Raises NotInstalled, with what to do, and where the kernel has to start again.
    """
    require_platform()
    if installed_hash() == sha256 and not missing(requirements_of_kit(), extras):
        print(f"volunteer_kit {version} of this run is installed already: run the next cell.")
        return
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(folder, f"volunteer_kit-{version}-py3-none-any.whl")
        wheel.write_bytes(download(urls, sha256))
        if (old := installed_version(KIT)) is not None:
            print(f"volunteer_kit {old} is here; this run uses another build ({version}), which takes its place.")
        target = wheel.as_uri() + "#sha256=" + sha256
        named = "[{}]".format(",".join(extras)) if extras else ""
        run = Installation(Path(folder))
        run.install([f"{KIT}{named} @ {target}"])
        if installed_hash() != sha256:  # pip keeps another build of the same version
            run.pip(["install", "--no-deps", "--force-reinstall", target], "the host's build")
        run.finish(was_loaded="volunteer_kit" in sys.modules)


def prepare(checkout=None, extras=()):
    """Install a checkout, editable; without one, what an installed kit still lacks. Nothing if nothing is missing."""
    require_platform()
    spec = importlib.util.find_spec("volunteer_kit")
    places = [Path(place).resolve() for place in (spec.submodule_search_locations if spec else None) or []]
    is_there = bool(places) if checkout is None else Path(checkout, "volunteer_kit").resolve() in places
    lacks = missing(requirements_of_kit(), extras) if is_there else []
    if not is_there or lacks:
        named = "[{}]".format(",".join(extras)) if extras else ""
        with tempfile.TemporaryDirectory() as folder:
            run = Installation(Path(folder))
            pinned = {text for text in lacks if text in PINNED}
            run.install(sorted(set(lacks) - pinned) if is_there else ["-e", str(checkout) + named])
            run.finish(was_loaded=False)
        return
    print("volunteer_kit {} is ready: run the next cell.".format(installed_version(KIT) or "of this checkout"))


class Installation:
    """One or more calls of pip, with what was installed before as constraints; `folder` holds its files."""

    def __init__(self, folder):
        self.folder, self.began = folder, time.monotonic()
        self.before, self.unpinned = installed_versions(), set()
        try:
            from pip._vendor.packaging.version import InvalidVersion, Version
        except ImportError:
            raise NotInstalled(NO_PIP.format(python=sys.executable)) from None
        for name, found in self.before.items():
            try:
                Version(found)
            except (InvalidVersion, TypeError):
                self.unpinned.add(name)  # such as 2.2.6-ubuntu; pip would refuse the whole list for it

    def install(self, requirements):
        """Install `requirements` beside all that is here; then what has to be installed without its requirements."""
        if requirements:
            log = self.attempt(requirements, set())
            if log is not None:
                if re.search(NO_FALLBACK, log):
                    raise NotInstalled(explained(log))
                loose = self.least_changes(requirements)
                log = self.attempt(requirements, loose)
                if log is not None:
                    raise NotInstalled(explained(log))
        absent = [pinned for pinned in PINNED if installed_version(pinned.split("==")[0]) != pinned.split("==")[1]]
        if absent:
            self.pip(["install", "--no-deps", *absent], "dalle-pytorch and taming-transformers")

    def attempt(self, requirements, loose, *options):
        """pip's log if it failed, None if it did not."""
        constraints = self.folder / "constraints.txt"
        lines = [f"{n}=={v}" for n, v in sorted(self.before.items()) if n not in loose | self.unpinned]
        constraints.write_text("".join(line + "\n" for line in lines))
        arguments = ["install", "--prefer-binary", *options, "-c", str(constraints), *requirements]
        words = "looking for versions that fit" if options else "the kit, beside what is here"
        code, log = run_pip(arguments, words, self.folder, self.began)
        return log if code else None

    def least_changes(self, requirements):
        """Names of installed packages that have to change: as few as pip finds when each in turn is kept."""
        print(
            "\nSome versions here do not fit. Looking for the fewest that have to change; this takes a minute or two."
        )
        report = self.folder / "report.json"
        dry = ("--dry-run", "--report", str(report))
        log = self.attempt(requirements, set(self.before), *dry)
        if log is not None:
            raise NotInstalled(explained(log))
        loose = self.changes_in(report)
        for name in sorted(loose, key=importance)[:MAX_TRIES]:
            if name in loose and self.attempt(requirements, loose - {name}, *dry) is None:
                loose = (loose - {name}) & self.changes_in(report)
        return loose

    def changes_in(self, report):
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
        names = {canonical(item["metadata"]["name"]) for item in found}
        return {name for name in names if name in self.before}

    def pip(self, arguments, words):
        """Raises NotInstalled if pip fails."""
        code, log = run_pip(arguments, words, self.folder, self.began)
        if code:
            raise NotInstalled(explained(log))

    def finish(self, was_loaded):
        """Say what is there now. Raises NotInstalled where the kernel holds what has been replaced."""
        notice_what_is_new()
        after = installed_versions()
        changed = {name: (old, after.get(name)) for name, old in self.before.items() if after.get(name) != old}
        kept = len(self.before) - len(changed)
        print("\rInstalled in {:.0f} s.{}".format(time.monotonic() - self.began, " " * 60))
        if changed:
            print("Changed, since the kit needs other versions:")
            for name, (old, new) in sorted(changed.items()):
                print("    {}  {} -> {}".format(name, old, new or "removed"))
        print(f"{kept} packages that were here stay as they were.")
        loaded = sorted(name for name in changed if set(modules_of(name)) & set(sys.modules))
        if was_loaded or loaded:
            what = ", ".join(["volunteer_kit"] * was_loaded + loaded)
            raise NotInstalled(RESTART.format(what=what))
        print(f"volunteer_kit {installed_version(KIT)} is ready: run the next cell.")


def run_pip(arguments, words, folder, began):
    """(pip's exit status, its log); meanwhile a line counts the seconds. An interrupt ends pip."""
    log = folder / "pip.log"
    settings = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_ROOT_USER_ACTION": "ignore",
                "PIP_PROGRESS_BAR": "off", "PYTHONWARNINGS": "ignore"}  # fmt: skip
    process = None
    try:
        with log.open("wb") as file:
            process, is_pressed = start(
                [sys.executable, "-m", "pip", *arguments], stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, cwd=str(folder), env=dict(os.environ, **settings), start_new_session=True,
            )  # fmt: skip
        if is_pressed:
            raise KeyboardInterrupt
        started = time.monotonic()
        while process.poll() is None:
            if time.monotonic() - started > RESOLVE_SECONDS:
                raise TimeoutError
            line = f"Installing {words}: {time.monotonic() - began:.0f} s"
            print("\r" + (line + now_reading(log))[:96].ljust(96), end="", flush=True)
            try:
                process.wait(2)
            except subprocess.TimeoutExpired:
                pass
    except KeyboardInterrupt:
        raise NotInstalled("\nStopped. Run this cell again to install.") from None
    except TimeoutError:
        return 1, read(log) + f"\nresolution-too-deep: pip was stopped after {RESOLVE_SECONDS} s"
    finally:
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, read(log)


def start(command, **settings):
    """(The process, whether the stop button was pressed meanwhile): an interrupt inside Popen would lose it."""
    pressed = []
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True)) if is_main else None
    try:
        return subprocess.Popen(command, **settings), pressed
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)


def read(log):
    return log.read_text(encoding="utf-8", errors="replace")


def now_reading(log):
    """The package that pip looks at, for the line that counts the seconds."""
    names = re.findall(r"^\s*(?:Collecting|Downloading|Using cached) ([A-Za-z0-9._-]+)", read(log)[-4000:], re.M)
    return " ({})".format(re.sub(r"-\d.*", "", names[-1])) if names else ""


def download(urls, sha256):
    """The bytes of the wheel from the first address that has the right ones. Raises NotInstalled."""
    replaced, silent = [], []
    for url in urls:
        host = urllib.parse.urlsplit(url).netloc
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "volunteer-kit-install"})
            with urllib.request.urlopen(request, timeout=60, context=certificates()) as answer:
                data = answer.read(MAX_WHEEL + 1)
        except urllib.error.HTTPError as error:
            (replaced if error.code in (404, 410) else silent).append(f"{host}: HTTP {error.code}")
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            is_unknown = isinstance(reason, socket.gaierror)
            silent.append("{}: {}".format(host, "no such name, or no internet" if is_unknown else reason))
        else:
            if hashlib.sha256(data).hexdigest() == sha256:
                return data
            replaced.append(f"{host}: another build")
    if replaced:
        raise NotInstalled(NEWER.format(seen="; ".join(replaced + silent)))
    raise NotInstalled(UNREACHED.format(seen="; ".join(silent) or "no address is given"))


def certificates():
    """Of the system, and those that pip brings: some Pythons have none."""
    context = ssl.create_default_context()
    try:
        from pip._vendor import certifi

        context.load_verify_locations(certifi.where())
    except (ImportError, OSError):
        pass
    return context


def notice_what_is_new():
    """For this process: a user's own folder that was made just now, and an editable checkout's .pth file."""
    importlib.invalidate_caches()
    if importlib.util.find_spec("volunteer_kit") is None:
        for folder in [*site.getsitepackages(), site.getusersitepackages()]:
            if os.path.isdir(folder):
                site.addsitedir(folder)
        importlib.invalidate_caches()


def installed_versions():
    """{name: version} of all that pip sees, the first of each name; without the kit, which is to change."""
    found = {}
    here = [place for place in sys.path if place not in ("", os.getcwd())]
    for distribution in importlib.metadata.distributions(path=here):
        name = distribution.metadata["Name"]  # None where an uninstall has left half of a folder
        if name and re.match(r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", name):
            found.setdefault(canonical(name), distribution.version)
    found.pop(KIT, None)
    return found


def installed_version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_hash():
    """SHA-256 of the wheel that the installed kit comes from, as pip has noted it; None if it is of a checkout."""
    try:
        noted = json.loads(importlib.metadata.distribution(KIT).read_text("direct_url.json") or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    archive = noted.get("archive_info") or {}
    return (archive.get("hashes") or {}).get("sha256") or archive.get("hash", "").partition("sha256=")[2] or None


def requirements_of_kit():
    """Lines as in requirements.txt, with markers for the extras; and what is installed without its requirements."""
    try:
        lines = importlib.metadata.requires(KIT) or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    return [*lines, *PINNED]


def missing(lines, extras):
    """Those of the requirements, of the kit and its extras, that nothing installed fulfils."""
    Requirement = requirement_class()
    found = []
    for asked in map(Requirement, lines) if Requirement else ():
        if asked.marker and not any(asked.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        version = installed_version(asked.name)
        if version is None or not asked.specifier.contains(version, prereleases=True):
            asked.marker = None
            found.append(str(asked))
    return found


def requirement_class():
    """Of packaging, which pip brings along; None without both."""
    for place in ("pip._vendor.packaging.requirements", "packaging.requirements"):
        try:
            return importlib.import_module(place).Requirement
        except ImportError:
            pass
    return None


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def modules_of(name):
    """Top-level modules of an installed package."""
    try:
        files = importlib.metadata.distribution(name).files or []
    except importlib.metadata.PackageNotFoundError:
        return [name.replace("-", "_")]
    return {re.sub(r"\.(py|so)$", "", file.parts[0]).partition(".")[0] for file in files if file.parts}


def importance(name):
    """A sort key: packages that a platform builds upon are kept first."""
    first = ("torch", "numpy", "protobuf", "grpcio", "setuptools", "pandas", "pyarrow", "transformers")
    return (first.index(name) if name in first else len(first), name)


def require_platform():
    """Raises NotInstalled where the kit cannot run at all."""
    if sys.version_info < (3, 10):  # noqa: UP036  (the platform decides what runs this)
        raise NotInstalled(OLD_PYTHON.format(found="{}.{}.{}".format(*sys.version_info[:3])))
    if sys.platform == "win32":
        raise NotInstalled(WINDOWS)


def explained(log):
    """The meaning of pip's log in words, with its last lines."""
    words = next((words for pattern, words in REASONS if re.search(pattern, log)), OTHER)
    lines = [line for line in log.splitlines() if line.strip()][-8:]
    return "\nThe kit could not be installed. {}\n\npip's last lines:\n{}".format(
        words, "\n".join("    " + line[:200] for line in lines)
    )


OFFLINE = (
    "There seems to be no internet.\n"
    '1. On Kaggle: Settings > "Internet on" (it needs an account with a verified phone number).\n'
    "2. Elsewhere: check the line, or the proxy (HTTPS_PROXY).\n"
    "3. Run this cell again."
)
FULL = "The disk is full.\n1. Delete what you can spare, or choose a machine with more disk.\n2. Run this cell again."
MANAGED = (
    "This Python belongs to the operating system, which lets nobody install into it.\n"
    "1. In a terminal: python3 -m venv ~/volunteer && ~/volunteer/bin/pip install jupyterlab==4.4.9\n"
    "2. Open this notebook with: ~/volunteer/bin/jupyter lab"
)
DENIED = "This Python's folder may not be written to.\n" + MANAGED.split("\n", 1)[1]
CONFLICT = (
    "No set of versions fits this Python.\n"
    "1. Choose the platform's newest runtime, or make an empty environment: python3 -m venv ~/volunteer\n"
    "2. If it is new already, send these lines to the run's host."
)
OLD_PIP = "pip is too old for this.\n1. Run: %pip install pip==25.3\n2. Restart the kernel and run this cell again."
OTHER = (
    "1. Run this cell again; an index is sometimes away for a minute.\n"
    "2. If it stays so, send these lines to the run's host."
)
_NET = (
    r"Temporary failure in name resolution|Name or service not known|nodename nor servname|Network is unreachable"
    r"|NewConnectionError|NameResolutionError|ConnectTimeoutError|Max retries exceeded|Could not fetch URL"
)
REASONS = (
    (r"No space left on device|Errno 28\b|Disk quota exceeded", FULL),
    (r"externally-managed-environment", MANAGED),
    (_NET, OFFLINE),
    (r"Permission denied|Errno 13\b|Read-only file system", DENIED),
    (r"no such option: --(dry-run|report)", OLD_PIP),
    (r"ResolutionImpossible|resolution-too-deep|No matching distribution found|conflicting dependencies", CONFLICT),
)
NO_FALLBACK = "|".join(pattern for pattern, words in REASONS if words in (FULL, MANAGED, OFFLINE, DENIED))
NO_PIP = "There is no pip for {python}.\n1. In a terminal: {python} -m ensurepip --upgrade\n2. Run this cell again."
NEWER = (
    "The host has a newer version of the kit than this notebook ({seen}).\n"
    "1. Open the run's link again: the notebook behind it is the current one.\n"
    "2. Or ask the host for it."
)
UNREACHED = (
    "The run's host does not answer ({seen}).\n"
    '1. Is the internet on? On Kaggle: Settings > "Internet on" (it needs an account with a verified phone number).\n'
    "2. Is the run still going? Its host knows.\n"
    "3. Then run this cell again."
)
RESTART = (
    "Installed, but this kernel still holds the old {what}.\n"
    "1. Restart it (Colab: Runtime > Restart session; Kaggle: Run > Restart session; Jupyter: Kernel > Restart).\n"
    "2. Run all cells again; this one takes no time then."
)
OLD_PYTHON = (
    "The kit needs Python 3.10 or newer, and this kernel runs {found}.\n"
    "1. Choose a newer runtime or kernel, and run this cell again.\n"
    "2. On a machine of your own, install a newer Python: https://www.python.org/downloads"
)
WINDOWS = (
    "hivemind, which the kit is built upon, does not run on Windows itself.\n"
    "1. Install WSL (in PowerShell: wsl --install), and open this notebook there.\n"
    "2. Or use Kaggle or Colab."
)

if __name__ == "__main__":
    install(WHEEL_URLS, SHA256, VERSION)
