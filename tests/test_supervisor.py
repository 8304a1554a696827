"""The supervisor with real processes: a stand-in worker that speaks the protocol and has children of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from volunteer_kit import process_group
from volunteer_kit import supervisor as supervisor_module
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.training.protocol import OFFLINE, RENEW, Leave, WorkerSpec

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="counts processes through /proc")

# Plain prints: no import of the kit, so that a hundred of them start quickly.
STAND_IN = r"""
import json, os, signal, subprocess, sys, time

def tell(event, **fields):
    print(json.dumps({"event": event, "time": time.time(), **fields}), flush=True)

def epoch(number, total):
    tell("epoch", epoch=number, samples=1, total_samples=total, loss=1.0, group_size=1, received=1.0, seconds=0.1,
         sent_bytes=0)

spec = json.loads(sys.stdin.readline())
plan = spec["run"]
born = len(os.listdir(plan["births"]))
open(os.path.join(plan["births"], str(os.getpid())), "w").close()
life = plan["lives"][min(born, len(plan["lives"]) - 1)]  # what this worker does, by how many were there before
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(sleep, stdout=sys.stdout), subprocess.Popen(sleep, start_new_session=True)]
if "ignore" in life:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("Traceback: a loud crash", file=sys.stderr, flush=True)
tell("starting", pid=os.getpid(), name=spec["name"], token=spec["hf_token"], children=[child.pid for child in children])
if "plan" in life:
    batch = min(spec["most_samples"] or 64, life["plan"])
    tell("device", device="CPU", batch_size=batch, precision="fp32", threads=1, why="", memory_bytes=3_000_000_000,
         checkpointing=spec["recompute"])
if "garbage" in life:
    os.write(1, b"loading shard 3 of 9\n" + b"\xff\xfe\x00\n" + b"[1, 2]\n")
    os.write(1, b'{"event": "unknown"}\n' + b'{"event": []}\n')
    os.write(1, b"[" * 100_000 + b"\n" + b"x" * (3 << 20) + b"\n")
if "met" in life:
    tell("state_loaded", epoch=0, source="peers")
for number, total in enumerate(life.get("totals", ())):
    epoch(number, total)
if "error" in life:
    tell("error", kind=life.get("kind", "data"), message=life["error"])
if "counted" in life:
    open(life["counted"], "w").write("oom 9\noom_kill %d\n" % (born + 1))
if "exit" in life:
    sys.exit(life["exit"])
if "kill" in life:
    os.kill(os.getpid(), life["kill"])
for line in sys.stdin:
    command = json.loads(line)
    if command["command"] == "finish_at":
        tell("finished", epoch=command["epoch"], path="", total_samples=life.get("totals", [0])[-1])
    elif "ignore" not in life:
        tell("left", total_samples=life.get("totals", [0])[-1], epochs=len(life.get("totals", ())))
        sys.exit(0)
    else:
        tell("warning", kind="busy", message="not now")
while "ignore" in life:
    time.sleep(1)
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    """make(life, life, ...) -> Supervisor of a stand-in that lives these lives, one after the other."""
    (tmp_path / "stand_in_worker.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "births").mkdir()
    made = []

    def make_supervisor(*lives, **settings) -> Supervisor:
        spec = WorkerSpec(run={"births": str(tmp_path / "births"), "lives": lives}, name="stand-in")
        usual = {"module": "stand_in_worker", "log_path": tmp_path / "logs" / "worker.log", "backoff": 0.01}
        made.append(Supervisor(spec, **{**usual, **settings}))
        return made[-1]

    yield make_supervisor
    for supervisor in made:
        supervisor.close()


def until(supervisor: Supervisor, kind: str, count: int = 1) -> list[dict]:
    """Events up to the `count`-th of this kind."""
    seen = []
    while sum(event["event"] == kind for event in seen) < count:
        event = supervisor.next_event(timeout=120)
        assert event is not None, f"no {kind!r} came, only {[event['event'] for event in seen]}"
        seen.append(event)
    return seen


def the_rest(supervisor: Supervisor) -> list[dict]:
    """Events until none can come any more."""
    seen = []
    while (event := supervisor.next_event(timeout=120)) is not None:
        seen.append(event)
        assert len(seen) < 100
    assert not supervisor.running
    return seen


def kinds(events) -> list[str]:
    return [event["event"] for event in events]


def family(events) -> list[int]:
    """The pids of a worker and its children, from its "starting" event."""
    start = next(event for event in events if event["event"] == "starting")
    return [start["pid"], *start["children"]]


def alive(pids) -> list[int]:
    """Those that run; zombies, which only wait for being reaped by init, do not."""
    living = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        living += [pid] if state not in "ZX" else []
    return living


def gone(pids, within: float = 60.0) -> bool:
    deadline = time.monotonic() + within
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pids)


def test_events_commands_and_a_graceful_end(make, tmp_path):
    supervisor = make({"totals": [4, 9]})
    assert not supervisor.running and supervisor.pid is None
    supervisor.start()
    events = until(supervisor, "epoch", 2)
    pids = family(events)
    assert kinds(events) == ["starting", "epoch", "epoch"] and supervisor.pid == pids[0]
    assert supervisor.running and supervisor.total_samples == 9 and len(alive(pids)) == 3
    assert os.getsid(pids[0]) == pids[0] != os.getsid(0)  # Ctrl-C in the terminal does not reach it
    assert supervisor.next_event(timeout=0) is None  # none at the moment
    assert supervisor.finish_at(7) and until(supervisor, "finished")[-1]["epoch"] == 7
    assert supervisor.leave() is True
    assert alive(pids) == []
    assert kinds(the_rest(supervisor)) == ["left"]
    assert (supervisor.exit_code, supervisor.total_samples, supervisor.restarts) == (0, 9, 0)
    assert supervisor.send(Leave()) is False and supervisor.next_event(timeout=60) is None
    with pytest.raises(RuntimeError):
        supervisor.start()


def test_a_crash_is_followed_by_a_restart_that_keeps_the_samples(make):
    supervisor = make({"totals": [3, 5], "exit": 1}, {"totals": [2]}, {"totals": [1, 6]})
    supervisor.start()
    first = until(supervisor, "restarting")
    assert first[-1]["exit_code"] == 1 and first[-1]["restarts"] == 1 and "exit code 1" in first[-1]["message"]
    second = until(supervisor, "epoch")
    assert gone(family(first)) and supervisor.total_samples == 5 + 2
    supervisor.finish_at(40)
    until(supervisor, "finished")
    supervisor.kill()  # the injected fault
    third = until(supervisor, "restarting")
    assert third[-1]["exit_code"] == -signal.SIGKILL and "SIGKILL" in third[-1]["message"]
    assert alive(family(second)) == []
    fourth = until(supervisor, "finished")  # the command is repeated to the new worker
    assert fourth[-1]["epoch"] == 40 and family(fourth)[0] == supervisor.pid
    assert supervisor.total_samples == 5 + 2 + 6 and supervisor.restarts == 2
    supervisor.leave()
    assert supervisor.total_samples == 13 and alive(family(fourth)) == []


def test_a_fatal_error_is_not_repeated(make):
    supervisor = make({"totals": [2], "error": "The shard list is empty.", "exit": 2})
    supervisor.start()
    events = the_rest(supervisor)
    assert kinds(events) == ["starting", "epoch", "error", "gave_up"]
    assert events[-1]["exit_code"] == 2 and events[-1]["message"] == "The shard list is empty."
    assert supervisor.restarts == 0 and supervisor.total_samples == 2 and gone(family(events))
    assert supervisor.leave() is False


def test_the_last_events_count_when_the_machine_is_busy(make, monkeypatch):
    """The worker and all that it started have ended before its last lines are read."""
    read = supervisor_module.parse_event

    def read_late(line):
        if "error" in line:
            time.sleep(1.0)
        return read(line)

    monkeypatch.setattr(supervisor_module, "parse_event", read_late)
    supervisor = make({"totals": [2], "error": "The shard list is empty.", "exit": 2})
    supervisor.start()
    events = the_rest(supervisor)
    assert kinds(events) == ["starting", "epoch", "error", "gave_up"]
    assert events[-1]["message"] == "The shard list is empty." and supervisor.restarts == 0


def test_crashes_without_progress_end_in_giving_up(make, tmp_path):
    supervisor = make({"exit": 3}, max_restarts=2)
    supervisor.start()
    events = the_rest(supervisor)
    assert kinds(events) == ["starting", "restarting", "starting", "restarting", "starting", "gave_up"]
    assert [event["delay"] for event in events if event["event"] == "restarting"] == [0.01, 0.02]
    message = events[-1]["message"]
    assert "3 times" in message and str(supervisor.log_path) in message and "  | Traceback: a loud crash" in message


def test_progress_refills_the_patience(make):
    lives = [{"totals": [1], "exit": 1}] * 4 + [{"totals": [1]}]
    supervisor = make(*lives, max_restarts=1)
    supervisor.start()
    until(supervisor, "epoch", 5)
    assert supervisor.restarts == 4 and supervisor.total_samples == 5


def test_a_worker_waits_for_its_spec_and_leaves_without_one(make):
    supervisor = make({"totals": [1]})
    spec, supervisor.spec = supervisor.spec, None
    supervisor.start()
    while supervisor.pid is None:
        time.sleep(0.01)
    assert supervisor.next_event(timeout=0.3) is None
    supervisor.begin(spec)
    until(supervisor, "epoch")
    supervisor.leave()
    never = make({}, log_path=supervisor.log_path)
    never.spec = None
    never.start()
    while never.pid is None:
        time.sleep(0.01)
    never.close()
    assert not never.running and the_rest(never) == []


def test_what_is_said_before_the_spec_comes_after_it(make):
    """A worker that was told at once when to finish took that for its spec, and ended."""
    supervisor = make({"totals": [1]})
    spec, supervisor.spec = supervisor.spec, None
    supervisor.start()
    while supervisor.pid is None:
        time.sleep(0.01)
    assert not supervisor.finish_at(3), "there is nobody yet to take it"
    supervisor.begin(spec)
    assert until(supervisor, "finished")[-1]["epoch"] == 3
    supervisor.leave()


def test_a_dead_line_is_waited_for_only_if_it_was_there_before(make):
    supervisor = make({"error": "None of the first peers answered.", "exit": OFFLINE})
    supervisor.start()
    assert the_rest(supervisor)[-1]["message"] == "None of the first peers answered."


def test_a_line_that_was_there_is_waited_for_as_long_as_it_takes(make):
    supervisor = make({"met": True, "exit": OFFLINE}, *[{"exit": OFFLINE}] * 4, {"totals": [1]}, max_restarts=1)
    supervisor.start()
    seen = until(supervisor, "epoch")
    assert kinds(seen).count("restarting") == 5 and "Nobody could be reached" in seen[2]["message"]


def test_an_outage_is_told_by_its_cause(make):
    cause = "This machine's clock differs from the swarm's by more than 3 seconds.\n1. Set it"
    supervisor = make({"met": True, "exit": 1}, {"error": cause, "kind": "clock", "exit": OFFLINE}, {"totals": [1]})
    supervisor.start()
    told = [event["message"] for event in until(supervisor, "epoch") if event["event"] == "restarting"]
    assert told[1].startswith("This machine's clock differs from the swarm's by more than 3 seconds; the worker starts")


def test_outages_are_no_crashes(make):
    outages = [{"met": True, "exit": OFFLINE}, *[{"exit": OFFLINE}] * 4]
    supervisor = make(*outages, {"exit": 1}, *outages, {"totals": [1]}, max_restarts=1)
    supervisor.start()
    delays = [event["delay"] for event in until(supervisor, "epoch") if event["event"] == "restarting"]
    assert delays[:6] == pytest.approx([0.01, 0.02, 0.04, 0.08, 0.16, 0.01])


PORT_TAKEN = {"error": "The port is taken by another program.\n1. See which one", "kind": "port_taken", "exit": 2}


def test_what_is_in_the_way_only_now_is_tried_again_where_all_was_well_before(make):
    supervisor = make({"met": True, "exit": 1}, PORT_TAKEN, {**PORT_TAKEN, "kind": "startup"}, {"totals": [1]})
    supervisor.start()
    told = [event["message"] for event in until(supervisor, "epoch") if event["event"] == "restarting"]
    assert len(told) == 3 and told[1].startswith("The port is taken by another program; the worker starts again")


def test_what_stays_in_the_way_ends_in_its_own_words(make):
    supervisor = make({"met": True, "exit": 1}, PORT_TAKEN, max_restarts=2)
    supervisor.start()
    events = the_rest(supervisor)
    assert kinds(events).count("restarting") == 2 and events[-1]["message"] == PORT_TAKEN["error"]


def test_what_is_in_the_way_at_the_first_start_is_told_at_once(make):
    supervisor = make(PORT_TAKEN)
    supervisor.start()
    assert kinds(the_rest(supervisor)) == ["starting", "error", "gave_up"]


def test_a_worker_that_wants_to_begin_afresh_is_no_crash(make):
    supervisor = make({"totals": [2], "exit": RENEW}, {"totals": [3]}, backoff=60)
    supervisor.start()
    assert "restarting" not in kinds(until(supervisor, "epoch", 2))
    assert supervisor.restarts == 0 and supervisor.total_samples == 5


def test_without_restart(make):
    supervisor = make({"kill": int(signal.SIGSEGV)}, restart=False)
    supervisor.start()
    events = the_rest(supervisor)
    assert kinds(events) == ["starting", "gave_up"] and f"signal {int(signal.SIGSEGV)}" in events[-1]["message"]


def test_a_module_that_does_not_exist(make):
    supervisor = make({}, module="no_such_worker", max_restarts=0)
    supervisor.start()
    (event,) = the_rest(supervisor)
    assert event["event"] == "gave_up" and "no_such_worker" in event["message"]


def test_garbage_is_logged_and_passed_over(make):
    supervisor = make({"garbage": True, "totals": [1, 2, 3]})
    supervisor.start()
    assert kinds(until(supervisor, "epoch", 3)) == ["starting", "epoch", "epoch", "epoch"]
    supervisor.leave()
    log = supervisor.log_path.read_bytes()
    assert b"loading shard 3 of 9" in log and b"\xff\xfe" in log and b"a loud crash" in log and len(log) < 20_000


def test_a_worker_that_hangs_at_leaving(make, monkeypatch):
    monkeypatch.setattr(supervisor_module, "SIGTERM_GRACE", 0.2)
    supervisor = make({"ignore": True, "totals": [5]})
    supervisor.start()
    pids = family(until(supervisor, "epoch"))
    start = time.monotonic()
    assert supervisor.leave(timeout=0.3) is False
    assert time.monotonic() - start < 25 and alive(pids) == []
    assert supervisor.exit_code == -signal.SIGKILL and supervisor.total_samples == 5 and supervisor.restarts == 0
    assert "restarting" not in kinds(the_rest(supervisor))


def test_a_worker_that_never_reads(make, tmp_path):
    """A spec larger than the pipe's buffer, and nobody who takes it."""
    (tmp_path / "deaf_worker.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    supervisor = make({"padding": "x" * 300_000}, module="deaf_worker")
    supervisor.start()
    while not (supervisor.log_path.exists() and supervisor.log_path.read_text()):
        time.sleep(0.01)
    pid = supervisor.pid
    start = time.monotonic()
    assert supervisor.leave(timeout=0.2) is False
    assert supervisor.exit_code == -signal.SIGTERM and time.monotonic() - start < 25 and gone([pid])


def test_a_lost_end_mark_does_not_block(make):
    supervisor = make({"exit": 2})
    supervisor.start()
    the_rest(supervisor)
    supervisor._events.get_nowait()  # as a KeyboardInterrupt between taking it and putting it back
    assert supervisor.next_event(timeout=60) is None


def test_leaving_during_the_pause_before_a_restart(make):
    supervisor = make({"exit": 1}, backoff=60)
    supervisor.start()
    until(supervisor, "restarting")
    assert supervisor.running and supervisor.pid is None and not supervisor.finish_at(3)
    supervisor.leave()
    assert not supervisor.running and the_rest(supervisor) == []


def test_close_is_quick_and_repeatable(make):
    supervisor = make({"ignore": True})
    supervisor.close()  # before the start
    supervisor.start()
    pids = family(until(supervisor, "starting"))
    supervisor.close()
    assert alive(pids) == [] and not supervisor.running and supervisor.pid is None
    supervisor.close()
    supervisor.kill()


def test_close_right_after_start(make, tmp_path):
    for _ in range(5):
        supervisor = make({})
        supervisor.start()
        supervisor.close()
        assert not supervisor.running
        assert process_group.find(-1, "PYTHONPATH=" + os.environ["PYTHONPATH"]) == []


def test_the_context_manager_leaves(make):
    with make({"totals": [1]}) as supervisor:
        pids = family(until(supervisor, "epoch"))
    assert supervisor.exit_code == 0 and alive(pids) == []
    with pytest.raises(ZeroDivisionError), make({"ignore": True}) as supervisor:
        pids = family(until(supervisor, "starting"))
        1 / 0  # noqa: B018
    assert alive(pids) == []


def test_a_caller_that_never_reads_costs_no_memory(make, monkeypatch):
    monkeypatch.setattr(supervisor_module, "QUEUE_LIMIT", 3)
    supervisor = make({})
    for number in range(50):
        supervisor._take({"event": "step", "epoch": number})
        supervisor._take({"event": "epoch", "epoch": number, "total_samples": number})
    supervisor._events.put(None)
    found = kinds(iter(supervisor.next_event, None))
    assert found.count("epoch") == 50 and found.count("step") <= 3 and supervisor.total_samples == 49


@pytest.mark.parametrize("total", ["7", 7.5, None, True, -3])
def test_impossible_counts_are_not_counted(make, total):
    supervisor = make({})
    supervisor._take({"event": "epoch", "total_samples": total})
    assert supervisor.total_samples == 0


def test_secrets_are_not_in_the_workers_environment(make, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    monkeypatch.setenv("HARMLESS", "yes")
    supervisor = make({})
    supervisor.start()
    pid = family(until(supervisor, "starting"))[0]
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"hf_secret_value" not in environment and b"HARMLESS=yes" in environment


def test_the_environments_token_is_handed_over_by_the_pipe(make, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    supervisor, own = make({}), make({})
    own.spec = own.spec.model_copy(update={"hf_token": "hf_given"})
    for one, token in ((supervisor, "hf_of_the_environment"), (own, "hf_given")):
        one.start()
        assert until(one, "starting")[-1]["token"] == token
    assert supervisor.spec.hf_token is None


def test_a_log_that_has_grown_for_months_is_cut(make):
    supervisor = make({})
    supervisor.log_path.parent.mkdir()
    supervisor.log_path.write_bytes(b"a line of a log\n" * 700_000)
    supervisor.start()
    until(supervisor, "starting")
    supervisor.leave()
    log = supervisor.log_path.read_bytes()
    assert log.startswith(b"a line of a log\n") and len(log) < 1_100_000
    assert log.endswith(b"Traceback: a loud crash\n")


PARENT = """
import json, os, sys, time
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.training.protocol import WorkerSpec
spec = WorkerSpec(run=json.loads(sys.argv[1]))
supervisor = Supervisor(spec, log_path=sys.argv[2], module="stand_in_worker")
supervisor.start()
event = supervisor.next_event(timeout=120)
child = os.fork() if sys.argv[3] == "forks" else 0
if sys.argv[3] == "forks" and child == 0:
    time.sleep(600)
print(json.dumps({**event, "forked": child}), flush=True)
if sys.argv[3] != "exits":
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["killed", "forks", "exits"])
def test_when_the_supervising_process_ends(make, tmp_path, how):
    """Killed: the worker sees its stdin end, even if a forked child outlives its parent. Exits: it is told to leave."""
    run = json.dumps(make({"totals": [1]}).spec.run)
    arguments = [sys.executable, "-c", PARENT, run, str(tmp_path / "log"), how]
    root = str(Path(supervisor_module.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ["PYTHONPATH"]])}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        event = json.loads(parent.stdout.readline())
        if how != "exits":
            parent.kill()
        parent.wait(timeout=120)
    try:
        if how == "exits":
            assert parent.returncode == 0 and alive(family([event])) == []
        assert gone([event["pid"]])
    finally:
        for pid in [event["forked"], *event["children"]]:  # a real worker ends its own children
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def group(folder: Path, limit: int = 2_000_000_000) -> dict:
    """A machine whose control group has this limit, and the file in which its kills are counted."""
    inner = folder / "sys/fs/cgroup/box"
    inner.mkdir(parents=True)
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text("0::/box\n")
    (folder / "proc/meminfo").write_text("MemTotal: 16000000 kB\nMemAvailable: 12000000 kB\n")
    (inner / "memory.max").write_text(f"{limit}\n")
    (inner / "memory.current").write_text("1\n")
    (inner / "memory.events").write_text("oom 0\noom_kill 0\n")
    return {"counted": str(inner / "memory.events"), "kill": int(signal.SIGKILL)}


def test_a_worker_that_memory_ran_out_for_comes_back_smaller(make, tmp_path):
    """It restarted with the same plan, ten times, and named neither limit nor need."""
    killed = group(tmp_path / "root")
    supervisor = make({"plan": 4, **killed}, {"plan": 4, "totals": [1]}, root=tmp_path / "root")
    supervisor.start()
    events = until(supervisor, "epoch")
    told = next(event["message"] for event in events if event["event"] == "restarting")
    assert "leaves it 2.0 GB" in told and "needs about 3.0" in told and "batches of 4" in told
    assert told.endswith("with a smaller plan.")
    assert [event["batch_size"] for event in events if event["event"] == "device"] == [4, 2]


def test_memory_that_does_not_suffice_for_the_smallest_plan_ends_it(make, tmp_path):
    killed = {"plan": 4, **group(tmp_path / "root")}
    supervisor = make(killed, root=tmp_path / "root")
    supervisor.start()
    events = the_rest(supervisor)
    plans = [(event["batch_size"], event["checkpointing"]) for event in events if event["event"] == "device"]
    assert plans == [(4, False), (2, False), (1, False), (1, True)]
    message = events[-1]["message"]
    assert events[-1]["event"] == "gave_up" and "2.0 GB" in message and "about 3.0" in message
    assert "docker run --memory=4g" in message


def test_a_worker_that_somebody_killed_keeps_its_plan(make, tmp_path):
    group(tmp_path / "root")
    supervisor = make({"plan": 4, "kill": int(signal.SIGKILL)}, {"plan": 4, "totals": [1]}, root=tmp_path / "root")
    supervisor.start()
    events = until(supervisor, "epoch")
    assert [event["batch_size"] for event in events if event["event"] == "device"] == [4, 4]
