"""No output ends a program: an ISO-8859-1 terminal, a closed pipe, a full disk, no stdout at all."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from volunteer_kit import output
from volunteer_kit.widgets.text import TextSurface

KIT = Path(output.__file__).parent
SIGNS = "“Ça coûte 5 €…” – ● ▁▄█ 漢"
PROGRAM = f"""
import os, sys
from volunteer_kit import output
output.keep_up()
for stream in (sys.stdout, sys.stderr):
    for _ in range(3):
        print({SIGNS!r} + "." * 10_000, file=stream, flush=True)
    print("left in the buffer", file=stream)
os.write(3 if len(sys.argv) > 1 else 2, b"done")
file = open(os.devnull)
assert file.fileno() > 2, "a file has the number of a standard stream"
"""


def run(redirect: str = "", encoding: str = "utf-8", program: str = PROGRAM) -> subprocess.CompletedProcess:
    """A program under a shell's redirections; what it says is on descriptor 3, taken as its stdout here."""
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": os.getcwd()}
    command = f'"$0" -c "$1" 3 3>&1 {redirect}'
    return subprocess.run(["sh", "-c", command, sys.executable, program], env=environment, capture_output=True)


@pytest.mark.parametrize("redirect", ["1>&- 2>&-", "0<&- 1>&- 2>&-", "1>/dev/full 2>/dev/full", "1>&- 2>/dev/full"])
@pytest.mark.parametrize("buffered", [True, False])
def test_a_program_goes_on_whatever_becomes_of_its_output(redirect, buffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "" if buffered else "1")
    ended = run(redirect)
    assert ended.stdout.endswith(b"done") and ended.returncode == 0, ended
    assert b"Error" not in ended.stderr and b"Exception" not in ended.stderr


def test_a_reader_that_goes_away_is_no_error():
    """`volunteer-kit ... | head -1`"""
    read, write = os.pipe()
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=write, stderr=subprocess.PIPE, env=environment) as it:
        os.close(write)
        os.close(read)
        said = it.stderr.read()
    assert it.returncode == 0 and said.endswith(b"done") and b"BrokenPipe" not in said


@pytest.mark.parametrize(
    "encoding, shown",
    [("iso-8859-1", '"Ça coûte 5 ?..." - * _.= ?'), ("ascii", '"?a co?te 5 ?..." - * _.= ?'), ("utf-8", SIGNS)],
)
def test_a_terminal_without_the_characters_shows_similar_ones(encoding, shown):
    ended = run("2>/dev/null", encoding)
    assert ended.returncode == 0 and ended.stdout.decode(encoding).startswith(shown + "...")


def test_a_terminal_that_hangs_up_is_no_error():
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    late = "import sys; sys.stdin.readline()\n" + PROGRAM
    with subprocess.Popen(
        [sys.executable, "-c", late], stdin=subprocess.PIPE, stdout=theirs, stderr=subprocess.PIPE, env=environment
    ) as it:
        os.close(theirs)
        os.close(ours)
        it.stdin.write(b"\n")
        it.stdin.close()
        said = it.stderr.read()
    assert it.returncode == 0 and said.endswith(b"done")


def test_a_pipe_that_does_not_wait_loses_nothing_to_a_reader_that_comes():
    read, write = os.pipe()
    os.set_blocking(write, False)
    program = "from volunteer_kit import output; output.keep_up(); print('x' * 300_000)"
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, "-c", program], stdout=write, env=environment) as it:
        os.close(write)
        with open(read, "rb") as lines:
            assert len(lines.read()) == 300_001
    assert it.returncode == 0


def test_every_program_of_the_kit_keeps_its_output_up():
    sources = {path.relative_to(KIT).as_posix(): path.read_text(encoding="utf-8") for path in KIT.rglob("*.py")}
    programs = {path for path, source in sources.items() if re.search(r'^if __name__ == "__main__":', source, re.M)}
    assert {"__main__.py", "cli.py", "worker.py", "fetch/__main__.py", "host/child.py"} <= programs
    programs.remove("host/install_cell.py")  # a notebook's cell
    assert [path for path in programs if not re.search(r"output\.keep_up\(\)|do_chore\(", sources[path])] == []


@pytest.mark.slow
def test_a_volunteer_trains_on_when_its_terminal_is_gone(tmp_path):
    """In ISO-8859-1, and read by `head -1`."""
    read, write = os.pipe()
    environment = {**os.environ, "PYTHONIOENCODING": "iso-8859-1", "PYTHONPATH": os.getcwd()}
    words = "join demo --new-swarm --accept-terms --max-hours 0.002 --batch-size 16 --home".split()
    command = [sys.executable, "-m", "volunteer_kit", *words, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=write, stderr=subprocess.PIPE, env=environment
    ) as it:
        os.close(write)
        with open(read, "rb") as lines:
            assert lines.readline() == b'Lend this machine to "demo"\n'
        said = it.stderr.read()
    assert it.returncode == 0 and said == b""
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "left"


class Strict(io.StringIO):
    encoding = "iso-8859-1"

    def write(self, text):
        return super().write(text.encode(self.encoding).decode(self.encoding))


def test_a_line_of_the_library_needs_no_program_of_the_kit(monkeypatch):
    """join_swarm and SwarmTrainer in a script of one's own."""
    for stream in (Strict(), None, io.StringIO()):
        monkeypatch.setattr(sys, "stdout", stream)
        if stream is not None and not isinstance(stream, Strict):
            stream.close()
        output.say("“demo” – 5 €")
        TextSurface().say("“demo”")
        if isinstance(stream, Strict):
            assert stream.getvalue() == '"demo" - 5 ?\n"demo"\n'


def test_a_call_of_the_library_leaves_the_streams_as_they_were(capfd):
    before = sys.stdout
    with output.kept_up():
        print("“within”")
    assert sys.stdout is before and "within" in capfd.readouterr().out
    said = io.StringIO()
    kept, sys.stdout = sys.stdout, said
    try:
        with output.kept_up():
            assert sys.stdout is said, "a notebook's, or a test's"
            threading.Thread(target=print, args=("in a thread",)).run()
    finally:
        sys.stdout = kept
    assert said.getvalue() == "in a thread\n"
