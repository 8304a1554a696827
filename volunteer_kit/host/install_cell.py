# @title Install volunteer_kit { display-mode: "form" }
WHEEL_URLS = []
SHA256 = ""
VERSION = ""
# The text of this file is the first cell of a run's join.ipynb; the host fills in the three lines above. It installs
# exactly the host's wheel, beside what the platform brings, and needs the standard library and pip alone.
# The notebooks of a checkout run the same code (prepare).
# ruff: noqa: E402

import hashlib
import http.client
import importlib
import importlib.metadata
import importlib.util
import io
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
import types
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

KIT = "volunteer-kit"
PINNED = ("dalle-pytorch==1.6.6", "taming-transformers-rom1504==0.0.6")  # --no-deps: their own lists do not install
MAX_WHEEL = 64 * 2**20  # bytes
RESOLVE_SECONDS = 900  # of search alone: pip goes through old releases one by one where nothing fits
STOP_SECONDS = 10  # pip gets these to clean up
FILES_SECONDS = 120  # and these to end what it does in site-packages; a second press of the stop button cuts them short
MAX_TRIES = 8  # packages that are pinned again one by one after a conflict
MEMORY = "_volunteer_kit_restart"  # entry of sys.modules: it lives as long as the kernel, and longer than this cell
# Settings of pip that send packages elsewhere, leave some out, or silence the log, each the variable of an option.
NOT_FOR_PIP = (
    "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON", "PIP_REQUIRE_HASHES", "PIP_DRY_RUN", "PIP_NO_DEPS",
    "PIP_NO_DEPENDENCIES", "PIP_IGNORE_INSTALLED", "PIP_QUIET",
)  # fmt: skip


class NotInstalled(Exception):
    """Its lines are for the person; IPython shows them without a traceback."""

    def _render_traceback_(self):
        return str(self).splitlines()


def install(urls, sha256, version, extras=()):
    """Install the wheel with this SHA-256 from the first address that has it.

    Raises NotInstalled, with what to do, and where the kernel has to start again.
    """
    require_platform()
    add_user_folder()
    if installed_hash() == sha256 and not missing(requirements_of_kit(), extras):
        require_restart()
        require_found_by_import()
        print(f"volunteer_kit {version} of this run is installed already: run the next cell.")
        return
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(folder, f"volunteer_kit-{version}-py3-none-any.whl")
        wheel.write_bytes(download(urls, sha256))
        if (old := installed_version(KIT)) is not None:
            print(f"volunteer_kit {old} is here; this run uses another build ({version}), which takes its place.")
        target = wheel.as_uri() + "#sha256=" + sha256
        named = "[{}]".format(",".join(extras)) if extras else ""
        with Installation(Path(folder)) as run:
            run.install([f"{KIT}{named} @ {target}"])
            notice_what_is_new()
            if installed_hash() != sha256:  # pip keeps another build of the same version
                run.pip(["install", "--no-deps", "--force-reinstall", target], "the host's build")
                notice_what_is_new()
            if installed_hash() != sha256:
                raise NotInstalled(ELSEWHERE.format(installed=kit_folder() or "another folder", found=import_folder()))
            require_found_by_import()
            run.finish()


def prepare(checkout=None, extras=()):
    """Install a checkout, editable; without one, what an installed kit still lacks. Nothing if nothing is missing."""
    require_platform()
    add_user_folder()
    wanted = None if checkout is None else Path(checkout).resolve()
    is_there = import_folder() is not None if wanted is None else import_folder() == wanted
    lacks = missing(requirements_of_kit(), extras) if is_there else []
    if not is_there or lacks:
        named = "[{}]".format(",".join(extras)) if extras else ""
        pinned = {text for text in lacks if text in PINNED}
        with tempfile.TemporaryDirectory() as folder, Installation(Path(folder)) as run:
            run.install(sorted(set(lacks) - pinned) if is_there else ["-e", str(checkout) + named])
            notice_what_is_new(wanted)
            if wanted is not None and import_folder() != wanted:
                raise NotInstalled(ELSEWHERE.format(installed=wanted, found=import_folder()))
            run.finish()
        return
    require_restart()
    print("volunteer_kit {} is ready: run the next cell.".format(installed_version(KIT) or "of this checkout"))


class Installation:
    """One or more calls of pip, with what was installed before as constraints; `folder` holds its files.

    Left in any way, it remembers for the kernel which of the replaced packages have been imported.
    """

    def __init__(self, folder):
        if importlib.util.find_spec("pip") is None:
            raise NotInstalled(NO_PIP.format(python=sys.executable))
        self.folder, self.began = folder, time.monotonic()
        self.before, self.kit_before = installed_versions(), kit_state()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.remember()

    def install(self, requirements):
        """Install `requirements` beside all that is here; then what has to be installed without its requirements."""
        if requirements:
            log = self.attempt(requirements, set())
            if log is not None:
                if reason_of(log) in NO_FALLBACK:
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
        kept = {name: version for name, version in self.before.items() if name not in loose}
        constraints.write_text("".join(line + "\n" for line in constraint_lines(kept)))
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
            if name not in loose:
                continue
            log = self.attempt(requirements, loose - {name}, *dry)
            if log is None:
                loose = (loose - {name}) & self.changes_in(report)
            elif reason_of(log) in NO_FALLBACK:
                break  # such as the time-out: the next search would take as long
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

    def changes(self):
        """{name: (old version, new one or None)} of what was here before."""
        after = installed_versions()
        return {name: (old, after.get(name)) for name, old in self.before.items() if after.get(name) != old}

    def remember(self):
        """Add what this kernel has imported of what was replaced to its memory. Returns changes()."""
        changed = self.changes()
        stale = {name for name in changed if set(modules_of(name)) & set(sys.modules)}
        if "volunteer_kit" in sys.modules and kit_state() != self.kit_before:
            stale.add("volunteer_kit")
        if stale:
            memory = sys.modules.setdefault(MEMORY, types.ModuleType(MEMORY))
            memory.stale = sorted(stale | set(getattr(memory, "stale", ())))
        return changed

    def finish(self):
        """Say what is there now. Raises NotInstalled where the kernel holds what has been replaced."""
        changed = self.remember()
        print("\rInstalled in {:.0f} s.{}".format(time.monotonic() - self.began, " " * 60))
        if changed:
            print("Changed, since the kit needs other versions:")
            for name, (old, new) in sorted(changed.items()):
                print("    {}  {} -> {}".format(name, old, new or "removed"))
        print(f"{len(self.before) - len(changed)} packages that were here stay as they were.")
        require_restart()
        print(f"volunteer_kit {installed_version(KIT)} is ready: run the next cell.")


def require_restart():
    """Raises NotInstalled if an earlier cell of this kernel, or this one, replaced what the kernel has imported."""
    stale = getattr(sys.modules.get(MEMORY), "stale", ())
    if stale:
        raise NotInstalled(RESTART.format(what=", ".join(stale)))


class SearchTime:
    """Seconds for which pip has searched for versions; downloads, builds and the installation do not count."""

    def __init__(self):
        self.seconds, self.last = 0.0, None

    def add(self, log, now):
        """:param log: pip's, so far. :param now: a clock in s. Returns the seconds."""
        if self.last is not None and not is_working(log):
            self.seconds += now - self.last
        self.last = now
        return self.seconds


def is_working(log):
    """Whether the last line of pip's log begins a download, a build or the installation, and does not end it."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if not line.startswith(("WARNING:", "INFO:", "DEPRECATION:"))), "")
    return re.match(AT_WORK, last) is not None and ": finished with status" not in last


# A download of mere metadata belongs to the search.
AT_WORK = (
    r"Downloading (?!\S+\.metadata\b)|Resuming download|Installing |Building |Preparing metadata|Getting requirements"
    r"|Running |Attempting uninstall|Found existing|Uninstalling|Successfully |Obtaining |Cloning "
)


def pip_environment():
    """The environment for pip: without settings that lead it away from this Python's own packages."""
    kept = {name: value for name, value in os.environ.items() if name not in NOT_FOR_PIP}
    if sys.prefix != sys.base_prefix:
        kept["PIP_USER"] = "0"  # a virtual environment does not import a user's own packages
    return kept


def run_pip(arguments, words, folder, began):
    """(pip's exit status, its log); meanwhile a line counts the seconds. An interrupt ends pip."""
    log = folder / "pip.log"
    settings = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_ROOT_USER_ACTION": "ignore",
                "PIP_PROGRESS_BAR": "off", "PYTHONWARNINGS": "ignore"}  # fmt: skip
    process, search = None, SearchTime()
    try:
        with log.open("wb") as file:
            process, is_pressed = start(
                [sys.executable, "-m", "pip", *arguments], stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, cwd=str(folder), env={**pip_environment(), **settings},
                start_new_session=True,
            )  # fmt: skip
        if is_pressed:
            raise KeyboardInterrupt
        while process.poll() is None:
            if search.add(read(log), time.monotonic()) > RESOLVE_SECONDS:
                raise TimeoutError
            line = f"Installing {words}: {time.monotonic() - began:.0f} s"
            print("\r" + (line + now_reading(log))[:96].ljust(96), end="", flush=True)
            try:
                process.wait(2)
            except subprocess.TimeoutExpired:
                pass
    except KeyboardInterrupt:
        if process is not None and "Installing collected packages" in read(log):
            let_end(process)
        raise NotInstalled("\nStopped. Run this cell again to install.") from None
    except TimeoutError:
        stop(process)
        return 1, read(log) + f"\n{SEARCH_STOPPED} after {RESOLVE_SECONDS} s"
    finally:
        if process is not None:
            stop(process)
    return process.returncode, read(log)


def let_end(process):
    """Wait while pip replaces files: interrupted there, it has removed a package's old version and half of the new one
    is there."""
    print("\npip is replacing files; stopped now, it would leave packages broken. Waiting for its end.", flush=True)
    try:
        process.wait(FILES_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass


def stop(process):
    """End pip and all that it started, if it runs. It cleans up after SIGINT, and gets STOP_SECONDS for that."""
    if process.poll() is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(STOP_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt, ProcessLookupError):
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)  # pip itself, or what it has left behind
    except (ProcessLookupError, PermissionError):  # macOS says the latter of a group whose members have all ended
        pass
    process.wait()


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
    """The bytes of the wheel from the first address that has the right ones; the host's own comes first.

    Raises NotInstalled.
    """
    replaced, spoiled, silent = [], [], []
    for is_own, url in [(number == 0, url) for number, url in enumerate(urls)]:
        host = urllib.parse.urlsplit(url).netloc
        try:
            try:
                data = fetch(url)
            except BrokenOff:
                data = fetch(url)
        except BrokenOff as error:
            spoiled.append(f"{host}: {error}")
        except urllib.error.HTTPError as error:
            (replaced if is_own and error.code in (404, 410) else silent).append(f"{host}: HTTP {error.code}")
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            is_unknown = isinstance(reason, socket.gaierror)
            said = "no such name, or no internet" if is_unknown else str(reason).strip()
            silent.append(f"{host}: {said}{through_proxy(url)}")
        else:
            if hashlib.sha256(data).hexdigest() == sha256:
                return data
            if not data.startswith(b"PK"):
                spoiled.append(f"{host}: not a wheel; a login page?")
            elif len(data) > MAX_WHEEL:
                spoiled.append(f"{host}: more than {MAX_WHEEL >> 20} MiB")
            else:
                (replaced if is_own else spoiled).append(f"{host}: another build")
    words = NEWER if replaced else SPOILED if spoiled else UNREACHED
    raise NotInstalled(words.format(seen="; ".join(replaced + spoiled + silent) or "no address is given"))


class BrokenOff(Exception):
    """An answer began and did not arrive whole."""


def fetch(url):
    """At most MAX_WHEEL + 1 bytes of an answer. Raises BrokenOff, OSError, ValueError or HTTPException."""
    request = urllib.request.Request(url, headers={"User-Agent": "volunteer-kit-install"})
    handlers = [urllib.request.HTTPSHandler(context=certificates())]
    if is_on_this_machine(url):
        handlers.append(urllib.request.ProxyHandler({}))  # whatever http_proxy says
    with urllib.request.build_opener(*handlers).open(request, timeout=60) as answer:
        try:
            data = answer.read(MAX_WHEEL + 1)
        except (http.client.HTTPException, ConnectionError, TimeoutError):
            raise BrokenOff("the download was broken off") from None
        whole = answer.headers.get("Content-Length") or ""
    if whole.isdigit() and len(data) < min(int(whole), MAX_WHEEL + 1):
        raise BrokenOff(f"the download was broken off after {len(data)} of {whole} bytes")
    if data.startswith(b"PK") and len(data) <= MAX_WHEEL and not zipfile.is_zipfile(io.BytesIO(data)):
        raise BrokenOff("the download was broken off")
    return data


def is_on_this_machine(url):
    host = urllib.parse.urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


def through_proxy(url):
    """A clause that names the environment's proxy, without its password, where the address is asked through one."""
    parts = urllib.parse.urlsplit(url)
    value = urllib.request.getproxies().get(parts.scheme)
    if not value or is_on_this_machine(url) or urllib.request.proxy_bypass(parts.netloc):
        return ""
    return ", through the proxy {} of {}_proxy".format(value.rpartition("@")[2], parts.scheme)


def certificates():
    """Of the system, and those that pip brings: some Pythons have none."""
    context = ssl.create_default_context()
    try:
        from pip._vendor import certifi

        context.load_verify_locations(certifi.where())
    except (ImportError, OSError):
        pass
    return context


def add_user_folder():
    """Let this process import a user's own packages if their folder was made after the process began.

    They come before the platform's, as in a new kernel: an older kit may lie there.
    """
    folder = site.getusersitepackages()
    if site.ENABLE_USER_SITE and os.path.isdir(folder) and folder not in sys.path:
        before = list(sys.path)
        site.addsitedir(folder)
        new = [place for place in sys.path if place not in before]
        theirs = [before.index(place) for place in site.getsitepackages() if place in before]
        at = min(theirs, default=len(before))
        sys.path[:] = before[:at] + new + before[at:]
    importlib.invalidate_caches()


def notice_what_is_new(wanted=None):
    """For this process: a user's own folder that was made just now, and the .pth file of an editable checkout."""
    add_user_folder()
    found = import_folder()
    if found is None or (wanted is not None and found != wanted):
        for folder in [*site.getsitepackages(), site.getusersitepackages()]:
            if os.path.isdir(folder):
                site.addsitedir(folder)
        importlib.invalidate_caches()


def import_folder():
    """The folder that `import volunteer_kit` finds the kit in, in a new kernel, too; None if it finds none."""
    for finder in sys.meta_path:
        spec = finder.find_spec("volunteer_kit", None) if hasattr(finder, "find_spec") else None
        if spec is not None:
            places = list(spec.submodule_search_locations or [])
            return Path(places[0]).parent.resolve() if places else None
    return None


def kit_folder():
    """The folder of the kit that pip would list; None if it would list none."""
    try:
        return Path(str(importlib.metadata.distribution(KIT).locate_file(""))).resolve()
    except importlib.metadata.PackageNotFoundError:
        return None


def kit_state():
    """Another value once the kit has been replaced."""
    return installed_version(KIT), installed_hash(), import_folder()


def require_found_by_import():
    """Raises NotInstalled if another kit hides the one that pip has installed."""
    if import_folder() != kit_folder():
        raise NotInstalled(ELSEWHERE.format(installed=kit_folder(), found=import_folder()))


def installed_versions():
    """{name: version} of all that Python finds; without the kit, which is to change.

    Half-removed packages do not count (folders such as `~orch-1.0.dist-info`), nor those whose metadata is unreadable.
    """
    found = {}
    here = [place for place in sys.path if place not in ("", os.getcwd())]
    for distribution in importlib.metadata.distributions(path=here):
        try:
            name = distribution.metadata["Name"]  # None where an uninstall has left half of a folder
            if not name or not re.match(r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", name):
                continue
            if canonical(name) in found:
                continue
            first = next(iter(importlib.metadata.distributions(name=name, path=here)), None)  # none for `~orch`
            version = first.version if first is not None else None
        except UnicodeDecodeError:
            continue
        if version:
            found[canonical(name)] = version
    found.pop(KIT, None)
    return found


def unreadable_folders():
    """The metadata folders that cannot be read as UTF-8."""
    found = []
    for distribution in importlib.metadata.distributions():
        try:
            distribution.metadata["Name"]
        except UnicodeDecodeError:
            found.append(str(getattr(distribution, "_path", "") or distribution.locate_file("")))
    return found


def constraint_lines(versions):
    """`name==version` of each whose version pip understands; for one as 2.2.6-ubuntu it would refuse the whole list."""
    _, Version = packaging_classes()
    lines = []
    for name, version in sorted(versions.items()):
        try:
            if Version is not None:
                Version(version)
        except (ValueError, TypeError):
            continue
        lines.append(f"{name}=={version}")
    return lines


def installed_version(name):
    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, UnicodeDecodeError):
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
    Requirement, _ = packaging_classes()
    found = []
    for asked in map(Requirement, lines) if Requirement else ():
        if asked.marker and not any(asked.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        version = installed_version(asked.name)
        if version is None or not asked.specifier.contains(version, prereleases=True):
            asked.marker = None
            found.append(str(asked))
    return found


def packaging_classes():
    """(Requirement, Version) of packaging, which pip brings along; (None, None) without both."""
    for place in ("pip._vendor.packaging", "packaging"):
        try:
            requirements = importlib.import_module(place + ".requirements")
            return requirements.Requirement, importlib.import_module(place + ".version").Version
        except ImportError:
            pass
    return None, None


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def modules_of(name):
    """Top-level modules of an installed package."""
    try:
        files = importlib.metadata.distribution(name).files or []
    except (importlib.metadata.PackageNotFoundError, UnicodeDecodeError):
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


def reason_of(log):
    """A key of WORDS: the cause of pip's (or uv's) failure; "" if it is none of them.

    pip warns of each try that it repeats, and most of those succeed. So its errors decide; warnings tell only why a
    package could not be found.
    """
    lines = [line for line in log.splitlines() if not re.match(r"\s*WARNING:", line)]
    first = next((number for number, line in enumerate(lines) if re.match(r"\s*error:", line, re.I)), None)
    errors = "\n".join(lines[first:] if first is not None else lines)
    for key, pattern in REASONS:
        if re.search(pattern, log if key == "offline" else errors):
            return key
    return ""


def explained(log):
    """The meaning of pip's log in words, with its last lines."""
    lines = [line for line in log.splitlines() if line.strip()][-8:]
    words = WORDS.get(reason_of(log), OTHER)
    if words == UNREADABLE:
        words = UNREADABLE.format(folders=", ".join(unreadable_folders()))
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
TOO_LONG = (
    f"pip searched for versions that fit for {RESOLVE_SECONDS // 60} minutes, and found none.\n"
    "1. Choose the platform's newest runtime, or make an empty environment: python3 -m venv ~/volunteer\n"
    "2. Run this cell there: pip has fewer versions to compare."
)
UNREADABLE = (
    "This pip cannot read the metadata of an installed package, since it is not UTF-8: {folders}\n"
    "1. Remove that folder, or install the package that it belongs to again by the way it came.\n"
    "2. Run this cell again."
)
SEARCH_STOPPED = "The search for versions was stopped"
WORDS = {
    "too long": TOO_LONG, "full": FULL, "managed": MANAGED, "denied": DENIED, "old pip": OLD_PIP,
    "conflict": CONFLICT, "offline": OFFLINE, "absent": CONFLICT,
    "unreadable": UNREADABLE,
}  # fmt: skip
# In this order: a conflict is no matter of the network, and a package that is not found may be one.
REASONS = (
    ("too long", SEARCH_STOPPED),
    ("full", r"No space left|Errno 28\b|Disk quota exceeded"),
    ("managed", r"externally-managed-environment|externally managed"),
    ("old pip", r"no such option: --(dry-run|report)"),
    ("unreadable", r"UnicodeDecodeError"),
    ("conflict", r"ResolutionImpossible|resolution-too-deep|conflicting dependencies|No solution found"),
    ("denied", r"Permission denied|Errno 13\b|Read-only file system"),
    ("offline", r"Temporary failure in name resolution|Name or service not known|nodename nor servname"
                r"|Network is unreachable|No route to host|Connection refused|Connection reset|Connection aborted"
                r"|Failed to establish a new connection|NewConnectionError|NameResolutionError|ConnectTimeoutError"
                r"|ReadTimeoutError|Read timed out|ProxyError|SSLError|SSLCertVerificationError|IncompleteRead"
                r"|RemoteDisconnected|ConnectionResetError|Max retries exceeded|Could not fetch URL|Failed to fetch"
                r"|error sending request"),
    ("absent", r"No matching distribution found"),
)  # fmt: skip
NO_FALLBACK = ("too long", "unreadable", "full", "managed", "offline", "denied")
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
SPOILED = (
    "The kit's file did not arrive ({seen}).\n"
    "1. Does this network ask for a login? Open any web page, and log in there. Behind a proxy, set HTTPS_PROXY.\n"
    "2. Run this cell again.\n"
    "3. If it stays so, open the run's link again, or send these lines to the run's host."
)
ELSEWHERE = (
    "pip has ended without an error, and this kernel would not use the kit that it installed.\n"
    "    installed: {installed}\n"
    "    found by import: {found}\n"
    "1. Is there another volunteer_kit in the second folder? Remove it: delete it, or open the notebook elsewhere.\n"
    "2. Does pip's configuration send packages elsewhere (target, prefix, user)? See: %pip config list\n"
    "3. Restart the kernel and run this cell again."
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
