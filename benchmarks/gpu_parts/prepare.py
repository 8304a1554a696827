"""Download the wheels that benchmarks/gpu.py needs on a GPU machine without a network.

    python benchmarks/gpu_parts/prepare.py                       into .gpu-wheels, for Python 3.12 on x86-64 Linux
    python benchmarks/gpu_parts/prepare.py --check PYTHON        and install them with PYTHON, offline, and import them

wheels.txt says which. bitsandbytes keeps its libraries for the CPU and for the CUDA version of the machine's torch only
(43 MB -> 3.4 MB). A package without a wheel is built here; it has to be pure Python.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
FOLDER = ROOT / ".gpu-wheels"
GLIBC = (34, 28, 27, 24, 17)  # manylinux_2_N tags that the machine takes; pip matches N exactly
MOST = 64 * 2**20  # bytes that may be carried to the machine, the repository among them
LIBRARY = re.compile(r"bitsandbytes/libbitsandbytes_(\w+)\.so")
# importable without torch; the others are imported on the machine itself, by the part `machine`
IMPORTS = (
    "base58", "blake3", "braceexpand", "cid", "cryptography.hazmat.primitives.asymmetric.ed25519", "configargparse",
    "google.protobuf.message", "mmh3", "multibase", "multicodec", "multihash", "netaddr", "prefetch_generator",
    "pydantic", "tenacity", "varint",
)  # fmt: skip
FILES = (
    "hivemind/__init__.py", "hivemind/hivemind_cli/p2pd", "dalle_pytorch/transformer.py",
    "taming/modules/diffusionmodules/model.py", "rotary_embedding_torch/__init__.py", "bitsandbytes/__init__.py",
)  # fmt: skip


def wanted(listing: Path = HERE / "wheels.txt") -> list[str]:
    """NAME==VERSION of each line. Raises SystemExit for a line that pins nothing."""
    lines = [line.split("#")[0].strip() for line in listing.read_text().splitlines()]
    for line in filter(None, lines):
        if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line):
            raise SystemExit(f"{listing}: {line!r} is not NAME==VERSION.")
    return [line for line in lines if line]


def fetch(pins: list[str], folder: Path, python: str) -> None:
    """A wheel of each pin into `folder`, old ones removed. Raises SystemExit naming those that cannot be had."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    target = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
    missing = []
    for pin in pins:  # one by one: pip downloads nothing at all when it cannot find one of many
        if not _pip("download", "--no-deps", *target, "-d", str(folder), pin):
            if not _pip("wheel", "--no-deps", "-w", str(folder), pin):
                missing.append(pin)
    compiled_here = [path.name for path in folder.glob("*-linux_*.whl")]
    if missing or compiled_here:
        raise SystemExit(f"No wheel for Python {python} on Linux: {', '.join(missing + compiled_here)}")


def _pip(*arguments: str) -> bool:
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True).returncode == 0


def slim(wheel: Path, keep: set[str]) -> None:
    """Leave out bitsandbytes' libraries for other devices than those in `keep` ("cpu", "cuda130")."""
    with zipfile.ZipFile(wheel) as whole:
        names = [name for name in whole.namelist() if not ((found := LIBRARY.match(name)) and found[1] not in keep)]
        kept = {found[1] for name in names if (found := LIBRARY.match(name))}
        if kept != keep:
            raise SystemExit(f"{wheel.name} has no library for {', '.join(sorted(keep - kept))}.")
        record = next(name for name in names if name.endswith(".dist-info/RECORD"))
        parts = {name: whole.read(name) for name in names if name != record}
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    for name, data in parts.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        writer.writerow([name, f"sha256={digest}", len(data)])
    writer.writerow([record, "", ""])
    parts[record] = lines.getvalue().encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as less:
        for name, data in parts.items():
            less.writestr(name, data)


def install(folder: Path, python: str, target: Path) -> None:
    """As the GPU machine does: offline, without what they need, beside what is there. Raises SystemExit."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    command = [python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target", str(target)]
    done = subprocess.run([*command, *wheels], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{python} cannot install the wheels:\n{done.stderr}")


def check(folder: Path, python: str) -> None:
    """Install into an empty folder and import what needs no torch. Raises SystemExit saying what fails."""
    with tempfile.TemporaryDirectory() as scratch:
        install(folder, python, Path(scratch))
        absent = [name for name in FILES if not (Path(scratch) / name).exists()]
        one = "try:\n    import {0}\nexcept Exception as error:\n    print('{0}', repr(error))\n"
        alone = {"PYTHONPATH": scratch, "PATH": "/usr/bin:/bin"}
        program = "".join(one.format(name) for name in IMPORTS)
        done = subprocess.run([python, "-s", "-c", program], capture_output=True, text=True, env=alone)
        if absent or done.stdout or done.returncode:
            raise SystemExit(f"Installed, but: missing {absent}; imports:\n{done.stdout}{done.stderr}")


def tree_bytes() -> int:
    """The size of the tracked files, which travel beside the wheels."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout
    return sum(path.stat().st_size for name in listed.split("\0") if name and (path := ROOT / name).is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--python", default="3.12", help="of the GPU machine")
    parser.add_argument("--cuda", default="130", help="of its torch: torch.version.cuda without the dot")
    parser.add_argument("--check", metavar="PYTHON", help="an interpreter of that version, to try the wheels with")
    options = parser.parse_args()
    fetch(wanted(), options.folder, options.python)
    for wheel in options.folder.glob("bitsandbytes-*.whl"):
        slim(wheel, {"cpu", f"cuda{options.cuda}"})
    sizes = {path.name: path.stat().st_size for path in sorted(options.folder.glob("*.whl"))}
    for name, size in sizes.items():
        print(f"{size / 2**20:8.2f} MiB  {name}")
    total, tree = sum(sizes.values()), tree_bytes()
    print(f"{total / 2**20:8.2f} MiB  in {options.folder}, beside {tree / 2**20:.1f} MiB of repository")
    if total + tree > MOST:
        raise SystemExit(f"That is more than the {MOST / 2**20:.0f} MiB that can be carried.")
    if options.check:
        check(options.folder, options.check)
        print(f"{options.check} installs and imports them.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
