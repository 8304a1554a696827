"""The two machines, what each has, and what the doctor has to say of it."""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from benchmarks.netlab import NoNetlab
from benchmarks.prepared_parts.machine import NOBODY, Faults, Machine, program
from benchmarks.prepared_parts.report import Naming, Said, printed, read
from benchmarks.reachability_parts.cells import Cell, House, machines
from volunteer_kit.home import MAX_LOG
from volunteer_kit.run_reader import RUN_FILES
from volunteer_kit.storage.holders import holders
from volunteer_kit.swarm.net.identity import ensure_identity

PATIENCE = 300.0  # s for one step; on idle cores all take two minutes
HOST4, HOST6, PORT, HUB, AUTHORITY = "45.77.0.1", "2a01:4f8:0:1::1", 4001, 8443, 8444
PROXY = "http://ada:secret@192.168.31.9:3128"
GB = 1e9
HOST = House((f"{HOST4}/24", f"{HOST6}/64"), ("192.168.0.0/16", "2a01:4f8::/32"))
HOME = House(("192.168.31.2/24", "2a01:4f8:0:31::2/64"), ("45.77.0.0/24", "2a01:4f8::/32"), ("ip4", "ip6"), True)
IPV6_ONLY = House(("2a01:4f8:0:32::2/64",), ("2a01:4f8::/32",), has_ip4=False)
CLONE = House(("45.77.0.2/24",), ("192.168.0.0/16",))
FIRST = (f"/ip4/{HOST4}", f"/ip6/{HOST6}")


class Scene(NamedTuple):
    """One machine, as the doctor saw it.

    :ivar namings: item of the issue -> what has to be said
    :ivar found: what was said
    :ivar printed: all of it
    """

    namings: Mapping[str, Sequence[Naming]]
    found: Mapping[str, Said]
    printed: str
    notes: str = ""


def look_at_all_at_once(folder: Path) -> Scene:
    """Raises NoNetlab."""
    folder = folder / "first"
    folder.mkdir()
    certificate, key = _certificate(folder)
    cell = Cell("prepared", "", (HOST, HOME, CLONE), FIRST)
    with machines(cell) as (world, there, elsewhere), ExitStack() as stack:
        peers = stack.enter_context(_first_peer(world, folder))
        served = [str(Path(__file__).with_name("server.py")), str(certificate), str(key), f"{HUB}=503"]
        stack.enter_context(program(world, served, folder / "server.txt"))
        run = _run_file(folder / "run.yaml", peers)
        home, copy = folder / "home", folder / "copy"
        ensure_identity(home / "identity.key")
        shutil.copytree(home, copy)
        stack.enter_context(_copy_of_the_key(elsewhere, run, copy, folder))
        faults = Faults(
            shm_mb=64, memory=int(2.7 * GB), start_method="forkserver", encoding="latin1", umask="000",
            variables={
                "HF_ENDPOINT": f"https://{HOST4}:{HUB}", "REQUESTS_CA_BUNDLE": str(certificate), "HTTP_PROXY": PROXY,
            },
        )  # fmt: skip
        with Machine(there, faults, folder / "machine") as machine:
            volunteer = _stopped_volunteer(machine, home, folder)
            home.chmod(0o777)
            _until(lambda: b"your samples are in" in (folder / "copy.txt").read_bytes(), "the copy takes part", folder)
            output = folder / "doctor.txt"
            doctor = machine.start("doctor", str(run), "--home", str(home), output=output, home=folder)
            try:
                _wait_for_answers(doctor)
                machine.set_clock(3600.0)
                _until(lambda: doctor.poll() is not None, "the doctor ends", folder)
            finally:
                for one in (doctor, volunteer):
                    if one.poll() is None:
                        one.kill()
                    one.wait()
            notes = "" if machine.has_cgroup else "No control group can be made here: the limit is only stated."
    return Scene(_all_at_once(volunteer.pid), read(output), printed(output), notes)


def _all_at_once(volunteer: int) -> dict[str, list[Naming]]:
    proxy = r"HTTP_PROXY=http://ada:\*\*\*@192\.168\.31\.9:3128 does not answer"
    ways = ("fg ", f"kill -CONT {volunteer}", f"kill {volunteer}")
    return {
        "1_reachable": [Naming("reachable", "ok", ("private IPv4 address, behind a router", "cannot call this"))],
        "2_same_key": [Naming("key", "warning", ("another machine takes part",), (r"mv .*identity\.key",))],
        "3_locks": [Naming("locks", "ok", ("record locks; there is no flock",))],
        "5_start_method": [Naming("start method", "ok", ("forkserver by default; the kit forks its own",))],
        "6_output": [Naming("terminal", "warning", ("iso-?8859-1|latin",), ("LANG=C.UTF-8",))],
        "7_proxies": [Naming("proxies", "warning", (proxy,), ("unset HTTP_PROXY",))],
        "8_own_causes_first": [
            Naming("Hub", "warning", ("HTTP 503: it is up, and has trouble of its own; .* again in 2 min",), ("Wait",)),
            Naming("clock steady", "problem", ("jumped forward by 1 h",), ("timedatectl",)),
        ],
        "9_memory_limit": [
            Naming("memory limit", "problem", (r"leaves 2\.7 GB; training needs about 3\.0",), ("--memory",)),
        ],
        "10_stopped": [Naming("volunteer", "problem", (f"process {volunteer} .*stopped",), ways)],
        "11_smaller": [
            Naming("rights", "warning", ("everybody may replace files", "the umask is 000"), ("chmod go-w",)),
            Naming("kit", "warning", (r"kit is older: .*0\.99\.0",), ("Install the version",)),
        ],
    }


def look_at_the_rest(folder: Path) -> Scene:
    """Raises NoNetlab."""
    folder = folder / "second"
    folder.mkdir()
    certificate, key = _certificate(folder)
    cell = Cell("prepared", "", (HOST, IPV6_ONLY), FIRST)
    with machines(cell) as (world, there), ExitStack() as stack:
        peers = stack.enter_context(_first_peer(world, folder))
        served = [str(Path(__file__).with_name("server.py")), str(certificate), str(key), f"{AUTHORITY}=429"]
        stack.enter_context(program(world, served, folder / "server.txt"))
        run = _run_file(folder / "run.yaml", peers, f"https://[{HOST6}]:{AUTHORITY}")
        home = folder / "home"
        home.mkdir()
        os.chown(home, NOBODY, NOBODY)
        with (home / "worker.log").open("wb") as log:
            log.truncate(20 * MAX_LOG)  # sparse
        faults = Faults(
            no_record_locks=True, clock_off=-3600.0, user=NOBODY,
            variables={"HF_ENDPOINT": f"https://[{HOST6}]:{HUB}", "REQUESTS_CA_BUNDLE": str(certificate)},
        )  # fmt: skip
        with Machine(there, faults, folder / "machine") as machine:
            output = folder / "doctor.txt"
            doctor = machine.start("doctor", str(run), "--home", str(home), output=output, home=folder)
            try:
                _until(lambda: doctor.poll() is not None, "the doctor ends", folder)
            finally:
                if doctor.poll() is None:
                    doctor.kill()
                doctor.wait()
    namings = {
        "1_reachable": [Naming("reachable", "ok", ("IPv6 only, public", "reached this machine by IPv6"))],
        "3_locks": [Naming("locks", "warning", ("knows no locks",), ("--home FOLDER",))],
        "6_no_home": [Naming("home", "ok", (f"id {NOBODY}.* has no home folder", "takes its place"))],
        "8_authority_is_busy": [
            Naming("authority", "problem", ("HTTP 429.* asked too often", "again in 2 min"), ("Wait",)),
            Naming("Hub", "problem", ("does not answer: Connection refused",)),
            Naming("line", "ok", ("not the line's fault",)),
        ],
        "8_clock": [Naming("clock", "problem", ("1 h behind",), ("timedatectl",))],
        "11_logs": [Naming("logs", "warning", (r"worker\.log \(200 MB\)",), ("truncate",))],
    }
    return Scene(namings, read(output), printed(output))


# --- what is around them ---


@contextmanager
def _first_peer(namespace: str, folder: Path) -> Iterator[list[str]]:
    """Host an open run until the end of the block. Gives its addresses."""
    run, output = _run_file(folder / "host.yaml", []), folder / "host.txt"
    maddrs = [f"/ip4/0.0.0.0/tcp/{PORT}", f"/ip6/::/tcp/{PORT}"]
    words = ["-m", "volunteer_kit", "host", str(run), "--no-authority", "--folder", str(folder / "host")]
    words += [word for maddr in maddrs for word in ("--host-maddrs", maddr)]
    with program(namespace, words, output, HOME=str(folder)):
        _until(lambda: f"/ip4/{HOST4}/" in output.read_text(), "the first peer is up", folder)
        peer_id = output.read_text().partition(f"/ip4/{HOST4}/tcp/{PORT}/p2p/")[2].split()[0]
        yield [f"{start}/tcp/{PORT}/p2p/{peer_id}" for start in FIRST]


def _copy_of_the_key(namespace: str, run: Path, home: Path, folder: Path) -> AbstractContextManager[subprocess.Popen]:
    """A volunteer under the same key, whose kit is newer."""
    site = folder / "newer"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import volunteer_kit\nvolunteer_kit.__version__ = '0.99.0'\n")
    words = ["-m", "volunteer_kit", "join", str(run), "--accept-terms", "--home", str(home), "--batch-size", "1"]
    return program(namespace, words, folder / "copy.txt", HOME=str(folder), PYTHONPATH=str(site))


def _stopped_volunteer(machine: Machine, home: Path, folder: Path) -> subprocess.Popen:
    """In the doctor's folder, stopped by Ctrl-Z once its worker is there."""
    words = ["join", "demo", "--new-swarm", "--accept-terms", "--home", str(home)]
    volunteer = machine.start(*words, output=folder / "volunteer.txt", home=folder)
    _until(lambda: {one.lock for one in holders(home)} >= {"volunteer", "worker"}, "a volunteer is there", folder)
    os.kill(volunteer.pid, signal.SIGTSTP)
    _until(lambda: all(one.is_stopped for one in holders(home)), "it stands stopped", folder)
    return volunteer


def _wait_for_answers(doctor: subprocess.Popen) -> None:
    """Until one of the doctor's two longest looks, both at the run's peers, is over; the other one goes on."""
    seen: set[str] = set()
    deadline = time.monotonic() + PATIENCE
    while doctor.poll() is None and time.monotonic() < deadline:
        asking = set()
        for child in psutil.Process(doctor.pid).children():
            with suppress(psutil.Error):
                asking |= {"peer", "records"} & {*child.cmdline()}
        if seen - asking:
            return
        seen |= asking
        time.sleep(0.05)


def _run_file(path: Path, peers: Sequence[str], authority: str = "") -> Path:
    text = (RUN_FILES / "demo.yaml").read_text().replace("run_id: demo", "run_id: wide")
    text = text.replace("model: tiny", "model: {preset: tiny, dim: 896, depth: 4, heads: 14}")  # 26 M parameters
    text = text.replace("target_batch_size: 256", "target_batch_size: 4")
    text += "\ninitial_peers: [" + ", ".join(f"'{peer}'" for peer in peers) + "]\n"
    if authority:
        text += f"authority: {{url: '{authority}', public_key: 'ed25519:{'E' * 43}', open: true}}\n"
    path.write_text(text)
    return path


def _certificate(folder: Path) -> tuple[Path, Path]:
    """Certify the server's addresses, also for a clock that is hours off."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now, day = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=1)
    addresses = [x509.IPAddress(ipaddress.ip_address(one)) for one in (HOST4, HOST6)]
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - day).not_valid_after(now + 30 * day)
        .add_extension(x509.SubjectAlternativeName(addresses), critical=True).sign(key, hashes.SHA256())
    )  # fmt: skip
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    (folder / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return folder / "cert.pem", folder / "key.pem"


def _until(is_so: Callable[[], bool], what: str, folder: Path) -> None:
    """Raises NoNetlab where it is not so in time: with what the programs have said."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        if time.monotonic() > deadline:
            said = "\n".join(f"{file.name}: {printed(file)[-500:]}" for file in folder.glob("*.txt"))
            raise NoNetlab(f"It did not come so far that {what}.\n{said}")
        time.sleep(0.2)
