"""What benchmarks/round_trace.py writes down and counts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.round_trace import Function, Ran, files, functions, read_line, read_traces, rounds_of
from benchmarks.round_trace_parts import tracer
from benchmarks.round_trace_parts.classes import longest_chain, private_overrides

SCRIPT = """
import os, sys, threading, time
import volunteer_kit.module as module
from sitecustomize import open_window
window = open_window(os.environ["ROUND_TRACE_FOLDER"])
module.before()
window[0] = 7
module.Class().method()
thread = threading.Thread(target=module.in_thread)
thread.start()
thread.join()
if not os.fork():
    module.forked()
    os._exit(0)
os.wait()
window[0] = 0
module.after()
"""
MODULE = """
def before(): pass
def in_thread(): return [each for each in (1, 2)]
def forked(): pass
def after(): pass
class Class:
    def method(self): return inner()
def inner(): return (lambda: 1)()
"""


def test_functions_of_all_threads_and_processes_are_written_down_while_the_window_is_open(tmp_path: Path):
    package, traces = tmp_path / "volunteer_kit", tmp_path / "traces"
    package.mkdir()
    traces.mkdir()
    (package / "__init__.py").touch()
    (package / "module.py").write_text(MODULE)
    (traces / tracer.WINDOW).write_bytes(bytes(8))
    shutil.copy(tracer.__file__, tmp_path / "sitecustomize.py")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), tracer.FOLDER: str(traces)}
    subprocess.run([sys.executable, "-c", SCRIPT], env=environment, cwd=tmp_path, check=True, timeout=240)
    found = read_traces(traces)
    assert {each.window for each in found} == {7}
    names = {each.function.name.rpartition(".")[2] for each in found}
    assert names == {"method", "inner", "<lambda>", "in_thread", "forked"}
    assert len(list(traces.glob("*.trace"))) == 2
    assert {each.function.file for each in found} == {"module.py"}


@pytest.mark.parametrize(
    "line, ran",
    [
        (
            "3\tworker\t/x/volunteer_kit/swarm/node/engine.py\tEngine.begin\n",
            Ran(3, "worker", Function("volunteer_kit", "swarm/node/engine.py", "Engine.begin")),
        ),
        (
            "4\tLeanDHT\t/x/site-packages/hivemind/dht/node.py\tDHTNode.get\n",
            Ran(4, "LeanDHT", Function("hivemind", "dht/node.py", "DHTNode.get")),
        ),
        ("4\tworker\t/x/volunteer_kit/a.py\t<module>\n", None),
        ("4\tworker\t/x/volunteer_kit/a.py\tb.<locals>.<listcomp>\n", None),
    ],
)
def test_a_line_of_a_trace_is_a_function_or_nothing(line, ran):
    assert read_line(line) == ran


def step(epoch: int, window: int, group_size: int = 2, received: float = 1.0) -> dict:
    return {"event": "step", "epoch": epoch, "window": window, "group_size": group_size, "received": received}


def ran(window: int, name: str, process: str = "worker") -> Ran:
    return Ran(window, process, Function("volunteer_kit", f"{name}.py", name))


def test_a_round_is_what_both_peers_ran_for_one_epoch():
    steps = [
        [step(1, 1), step(2, 2), step(3, 3), step(4, 4, group_size=1), step(5, 5)],
        [step(1, 1), step(3, 2), step(4, 3), step(5, 4, received=0.5)],
    ]
    traces = [
        [ran(1, "first"), ran(3, "own"), ran(3, "shared"), ran(3, "talk", "LeanDHT"), ran(5, "last")],
        [ran(1, "first"), ran(2, "others"), ran(2, "shared"), ran(3, "alone")],
    ]
    rounds = rounds_of(steps, traces, skipped=1)
    assert len(rounds) == 1  # epoch 3: in 1 nothing counts yet, 2, 4 and 5 were not whole
    assert {each.name for each in functions(rounds[0])} == {"own", "shared", "others"}
    assert files(functions(rounds[0], processes=["LeanDHT"])) == {"talk.py"}


def class_of(module: str, name: str, bases: tuple[type, ...] = (), **members) -> type:
    return type(name, bases, {"__module__": module, **members})


def nothing(self) -> None:
    pass


Theirs = class_of("hivemind.optim", "Theirs", _step=nothing, __init__=nothing, public=nothing, _flag=True)
First = class_of("volunteer_kit.swarm.first", "First", (Theirs,))
Middle = class_of("volunteer_kit.swarm.middle", "Middle", (First,), _step=nothing, public=nothing, _own=nothing)
Mixin = class_of("volunteer_kit.swarm.mixin", "Mixin")
Last = class_of("volunteer_kit.swarm.last", "Last", (Mixin, Middle), _step=property(nothing), _own=nothing, _flag=False)


def test_private_methods_of_theirs_are_overridden():
    found = {(each.own, each.base, each.name) for each in private_overrides([Theirs, Middle, Mixin, Last])}
    assert found == {(Middle, Theirs, "_step"), (Last, Theirs, "_step")}


def test_the_longest_chain_has_classes_of_ours_alone():
    assert longest_chain([Theirs, Middle, Mixin, Last]) == [Last, Middle, First]
    assert longest_chain([]) == []
