"""benchmarks/gpu.py: all of it on the CPU, what it does with parts that fail or take too long, and its wheels."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu
from benchmarks.gpu_parts import prepare

ROOT = Path(__file__).parents[1]
FAULTY = """
import subprocess, sys, time

def measure(setting, tell, how):
    tell(first=1)
    if how == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        tell(child=child.pid)
        time.sleep(600)
    elif how == "raises":
        raise SystemExit("no such thing here")
    elif how == "is killed":
        import os
        os.kill(os.getpid(), 9)
    tell(second=float("nan"))
"""


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """-> run_apart of a part that does as it is told."""
    names = ("hangs", "raises", "is killed", "works")
    parts = tuple(gpu.Part(how, "faulty", 60, "", {"how": how}) for how in names)
    program = tmp_path / "gpu.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom benchmarks import gpu\n"
        f"import benchmarks.gpu_parts as package\npackage.__path__.append({str(tmp_path)!r})\n"
        f"gpu.PARTS = tuple(gpu.Part(*part) for part in {[tuple(part) for part in parts]!r})\nsys.exit(gpu.main())\n"
    )
    (tmp_path / "faulty.py").write_text(FAULTY)
    monkeypatch.setattr(gpu, "__file__", str(program))

    def run(how: str, seconds: float = 240.0) -> dict:
        part = next(part for part in parts if part.name == how)
        return gpu.run_apart(part, seconds, True, tmp_path / "log")

    return run


def test_what_a_part_told_is_kept_however_it_ends(faulty):
    works, raises, killed = faulty("works"), faulty("raises"), faulty("is killed")
    assert works["status"] == "ok" and works["second"] is None, "no NaN is written as JSON"
    assert raises["status"] == killed["status"] == "failed"
    assert raises["first"] == killed["first"] == 1
    assert "no such thing here" in raises["error"] and "SystemExit" in raises["traceback"]
    assert "exit code -9" in killed["error"]


def test_a_part_that_takes_too_long_is_ended_with_all_it_has_started(faulty):
    # once it has told of its child; how long that takes is the machine's affair
    found: dict = {}
    for seconds in (5.0, 20.0, 60.0):
        began = time.monotonic()
        found = faulty("hangs", seconds)
        assert found["status"] == "overran" and time.monotonic() - began >= seconds
        if "child" in found:
            break
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(found["child"]).status() == "zombie"
    assert "left_behind" not in found


def test_every_wheel_is_pinned_and_a_loose_line_is_refused(tmp_path):
    assert {"hivemind", "dalle-pytorch", "bitsandbytes"} <= {pin.split("==")[0] for pin in prepare.wanted()}
    loose = tmp_path / "wheels.txt"
    loose.write_text("hivemind==1.1.12\nnumpy\n")
    with pytest.raises(SystemExit, match="'numpy' is not NAME==VERSION"):
        prepare.wanted(loose)


def test_bitsandbytes_is_carried_with_the_libraries_of_one_machine(tmp_path):
    wheel = tmp_path / "bitsandbytes-1.0-py3-none-any.whl"
    parts = {
        f"bitsandbytes/libbitsandbytes_{kind}.so": b"machine code" for kind in ("cpu", "cuda128", "cuda130", "rocm70")
    }
    parts |= {
        "bitsandbytes/__init__.py": b"here = True\n",
        "bitsandbytes-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 1.0\n",
        "bitsandbytes-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "bitsandbytes-1.0.dist-info/RECORD": b"",
    }
    with zipfile.ZipFile(wheel, "w") as file:
        for name, data in parts.items():
            file.writestr(name, data)
    with pytest.raises(SystemExit, match="no library for cuda118"):
        prepare.slim(wheel, {"cpu", "cuda118"})
    prepare.slim(wheel, {"cpu", "cuda130"})
    prepare.install(tmp_path, sys.executable, tmp_path / "site")  # pip checks RECORD
    left = {path.name for path in (tmp_path / "site/bitsandbytes").iterdir()}
    assert left == {"__init__.py", "libbitsandbytes_cpu.so", "libbitsandbytes_cuda130.so"}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_of_it_on_the_cpu(tmp_path):
    """A GPU day that begins with a typing error is over."""
    pytest.importorskip("bitsandbytes")
    alike = ("model_bf16", "tuner_15", "tuner_16")  # as others, with another number; bf16 is slow on a CPU
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--out", str(tmp_path), "--skip", *alike]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    failed = {line["part"]: line.get("traceback", line.get("error")) for line in lines if line["status"] != "ok"}
    assert not failed and done.returncode == 0, failed or done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last == json.loads((tmp_path / "gpu.json").read_text())
    assert all(last[f"machine_{check}"] == "ok" for check in ("in_autocast", "forks_beside_the_device", "four_bits"))
    assert last["peers_parameters_equal"] and last["qlora_parameters_equal"] and last["qlora_quantized_tensors"] > 0
