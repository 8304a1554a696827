"""Every decoder of others' bytes: what is stored of earlier fuzzing is decoded again, and the fuzzer itself works."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time

import msgpack
import pytest
from hivemind.proto import dht_pb2

from tests.fuzz import forms
from tests.fuzz.minimise import minimise
from tests.fuzz.replay import CORPUS, FOUND, HERE, in_own_process, store, stored
from tests.fuzz.target import Fault, Target, examine

ROOT = HERE.parents[1]
NAMES = sorted(path.stem for path in CORPUS.glob("*.zip"))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict]:
    """Of all targets' seeds and stored inputs, each target's in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.replay"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stderr[-2000:]
    return {outcome["name"]: outcome for outcome in found}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_does_no_harm(name, outcomes):
    assert outcomes[name]["fault"] == ""


@pytest.mark.parametrize("name", NAMES)
def test_what_we_make_ourselves_is_accepted(name, outcomes):
    """Else nothing that the fuzzer begins with would get past the first check."""
    assert outcomes[name]["accepted_seeds"] > 0


def test_every_target_has_a_stored_corpus_and_every_corpus_a_target(outcomes):
    assert set(outcomes) == set(NAMES)
    assert {path.name for path in FOUND.iterdir() if path.is_dir()} <= set(NAMES)
    assert sum(path.stat().st_size for path in HERE.rglob("*") if path.suffix != ".pyc") < 2**20


# --- the fuzzer ---


def target(decode, *refusals: type[Exception], seeds=lambda: [b"seed"], **options) -> Target:
    return Target("target", decode, refusals, seeds, **options)


def allocate(data: bytes) -> bool:
    return bool(bytearray(b"x") * (300 * 2**20))


def spin(data: bytes) -> bool:
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    return True


def refuse(data: bytes) -> bool:
    raise KeyError(data)


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (allocate, "MB more memory for 4 bytes"),
        (spin, "s of processor time for 4 bytes"),
        (refuse, "KeyError: b'seed'"),
        (lambda data: os.kill(os.getpid(), signal.SIGSEGV), "seed 0: signal 11 ended the process"),
        (lambda data: os._exit(3), "seed 0: an error outside of the decoder"),
    ],
    ids=["memory", "time", "exception", "crash", "exit"],
)
def test_what_a_decoder_must_not_do_is_seen(decode, words):
    cpu_seconds = 0.1 if decode is spin else 60.0
    outcome = in_own_process("target", target(decode, ValueError, cpu_seconds=cpu_seconds, memory_mb=200))
    assert words in outcome.fault


def test_a_decoder_without_end_is_seen():
    outcome = in_own_process("target", target(lambda data: time.sleep(600)), patience=5)
    assert outcome.fault == "seed 0: no end within 5 s"


def test_a_refusal_is_no_fault():
    outcome = in_own_process("target", target(refuse, KeyError))
    assert (outcome.fault, outcome.inputs, outcome.accepted_seeds) == ("", 1, 0)
    assert in_own_process("target", target(bool)).accepted_seeds == 1


def test_faults_at_one_place_are_of_one_kind():
    kinds = set()
    for data in (b"a", b"b"):
        with pytest.raises(Fault) as fault:
            examine(target(refuse), data)
        kinds.add(fault.value.kind)
    assert len(kinds) == 1 and kinds.pop().startswith("KeyError-test_fuzz-")


TAR = tarfile.TarInfo("name").tobuf() + bytes(1024)
FORMS = {
    "msgpack": (forms.MSGPACK, msgpack.packb([1, {"a": b"b" * 20, "c": [None, 2.5]}, b"\x93\x01\x02\x03"])),
    "json": (forms.JSON, b'{"a": [1, "text", {"b": null}], "c": 2.5}'),
    "protobuf": (
        forms.Protobuf(dht_pb2.StoreRequest, forms.MSGPACK),
        dht_pb2.StoreRequest(keys=[b"k"], values=[msgpack.packb([1])], expiration_time=[1.0]).SerializeToString(),
    ),
    "text": (forms.Text("a:", "["), b"text of a file"),
    "framed": (forms.Framed("<Q"), (10).to_bytes(8, "little") + b'{"a": [1]}' + b"rest"),
    "tar": (forms.TAR, TAR),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_mutation_keeps_the_form_and_changes_something(name):
    form, data = FORMS[name]
    found, kept = set(), 0
    for seed in range(200):
        chance = random.Random(seed)
        flip = chance.randrange(256)
        changed = form.mutate(data, chance, lambda part, flip=flip: bytes(byte ^ flip for byte in part[:3]) + part[3:])
        found.add(changed)
        kept += keeps_form(name, changed)
    assert len(found) > 40 and kept >= 190


def keeps_form(name: str, data: bytes) -> bool:
    try:
        if name == "tar":
            return not data or bool(tarfile.TarInfo.frombuf(data[:512], "utf-8", "replace"))
        if name != "text":
            FORMS[name][0].mutate(data, random.Random(0), lambda part: part)
        return True
    except tarfile.HeaderError:
        return data[257:262] != b"ustar"  # its first block was taken away
    except Exception:
        return False


def test_a_corpus_is_as_small_as_it_can_be(tmp_path, monkeypatch):
    from volunteer_kit.data.source import SampleName

    one = target(lambda data: bool(SampleName.parse(data.decode())), ValueError)
    kept = minimise(one, [b"0/17/4711", b"0/1/2", b"no name", b"neither is this", b"0/1/3"])
    assert kept == [b"0/1/2", b"no name"]
    monkeypatch.setattr("tests.fuzz.replay.CORPUS", tmp_path)
    first = store("target", kept).read_bytes()
    assert store("target", kept).read_bytes() == first
    assert [data for _, data in stored("target")] == kept


def test_without_atheris_it_says_why_and_is_no_failure():
    code = "import runpy, sys; sys.modules['atheris'] = None; sys.argv = ['fuzz']; "
    code += "runpy.run_module('tests.fuzz', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0 and "this Python has no atheris" in done.stdout, done.stderr


CRASHES = """
import os, sys
from pathlib import Path
from tests.fuzz.engine import fuzz
from tests.fuzz.target import Target

def decode(data):
    if data[:1] == b"A":
        raise KeyError("A")
    if data == b"BC":
        os.kill(os.getpid(), 9)
    return True

place = Path(sys.argv[1])
result = fuzz(Target("t", decode, (), lambda: []), 5, place / "corpus", place / "found", place / "log")
print(result.executions > 1000, sorted(name.split("-")[0] for name in result.found))
"""


@pytest.mark.slow
def test_the_fuzzer_notes_errors_and_goes_on_after_a_crash(tmp_path):
    pytest.importorskip("atheris", reason="there is no atheris for this Python")
    for name in ("corpus", "found"):
        (tmp_path / name).mkdir()
    for name, data in (("error", b"A"), ("crash", b"BC")):
        (tmp_path / "corpus" / name).write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", CRASHES, str(tmp_path)], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.stdout == "True ['KeyError', 'signal']\n", done.stderr + (tmp_path / "log").read_text()
    (crash,) = (tmp_path / "found").glob("signal-9-*")
    assert crash.read_bytes() == b"BC"
