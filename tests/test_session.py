"""What a worker does beside its loop: when it begins afresh, what it watches, how it leaves."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time

from tests.demo_volunteer import demo_volunteer
from tests.waiting import wait_until
from volunteer_kit import session as session_module
from volunteer_kit.home import Home
from volunteer_kit.runs import load_run
from volunteer_kit.session import Left, Renew, Session
from volunteer_kit.session import lookout as lookout_module
from volunteer_kit.session.lookout import Lookout, memory_gb, should_renew
from volunteer_kit.session.tell import Tell
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.net.access.control import Admission
from volunteer_kit.swarm.net.same_key import SKEW
from volunteer_kit.swarm.options import StepReport, SwarmProgress
from volunteer_kit.swarm.records.failures import RoundCounts
from volunteer_kit.training.protocol import WorkerSpec

ROOMY, TIGHT = SimpleNamespace(total=16e9, available=8e9), SimpleNamespace(total=16e9, available=1e9)
HOUR = 3600.0


@pytest.mark.parametrize(
    ("held", "settled", "machine", "age", "renews"),
    [
        (2.0, 2.0, ROOMY, HOUR, False),
        (3.4, 2.0, ROOMY, HOUR, False),  # half as much again, and half a GB, are allowed
        (3.6, 2.0, ROOMY, HOUR, True),
        (3.6, 2.0, ROOMY, 600, False),  # so soon it is not growth
        (3.6, None, ROOMY, HOUR, False),
        (2.5, 2.0, TIGHT, HOUR, True),  # where memory is short, less growth is too much
        (2.2, 2.0, TIGHT, HOUR, False),  # and others have taken it
        (0.4, 0.2, ROOMY, HOUR, False),
    ],
)
def test_when_a_worker_begins_afresh(held, settled, machine, age, renews):
    assert should_renew(held, settled, machine, age) is renews


def test_memory_is_measured():
    assert 0.01 < memory_gb() < 20


# --- watching and leaving, with stand-ins for the network ---

RUN = load_run("demo")


NO_DHT = SimpleNamespace(get=lambda *_, **__: None, store=lambda *_, **__: True)


class Swarm:
    """The optimizer, as far as a session and its lookout see it."""

    cut_off, cut_off_for, local_epoch, states_asked_in_vain = None, 0.0, 0, 0
    on_download, why_too_slow = None, ""

    def __init__(self, join=lambda swarm: True):
        self.stops_waiting, self._join = threading.Event(), join
        self.reach = SimpleNamespace(known_peers=lambda: [], waits_for_itself=False, why_afresh="")

    def stop_waiting(self):
        self.stops_waiting.set()

    def traffic(self):
        return 3, 5

    def join(self, patience):
        return self._join(self)

    def settle(self, patience):
        return ""


class Events:
    """What is told, in order."""

    def __init__(self):
        self.seen, self._queue = [], queue.Queue()

    def __call__(self, event, **fields):
        self._queue.put((event, fields))

    def wait(self, kind):
        """The next of this kind."""
        while True:
            self.seen.append(self._queue.get(timeout=60))
            if self.seen[-1][0] == kind:
                return self.seen[-1][1]


@pytest.fixture
def make_session(tmp_path, monkeypatch):
    """A Session in the middle of its life; its lookout looks all the time."""
    monkeypatch.setattr(lookout_module, "LOOK_EVERY", 0.01)
    made = []

    def make(optimizer, **changes):
        session = Session.__new__(Session)
        values = dict(
            emit=Events(),
            home=Home(tmp_path),
            run=RUN,
            spec=SimpleNamespace(checkpoint_dir=None, resume=False, batch_size=8, finish_at=None, renew_above_gb=None),
            optimizer=optimizer,
            trainer=None,
            lookout=None,
            membership=SimpleNamespace(refused=threading.Event(), close=lambda: None),
            among=None,
            peer=SimpleNamespace(dht=NO_DHT, peer_id="us", admission=Admission()),
            board=SimpleNamespace(fetch=dict),
            tally=SimpleNamespace(totals=SimpleNamespace(samples=0), samples=0, end=lambda: None),
            reading=SimpleNamespace(share=lambda *_: None, next_batch=None),
            publish=lambda: None,
            model=SimpleNamespace(num_parameters=lambda: 1),
            stream=SimpleNamespace(read_ahead=lambda samples: None),
            compute=SimpleNamespace(
                batch_size=8, likely_batch=8, plan=SimpleNamespace(precision="fp32"), gradients=lambda programs: None
            ),
        )
        session.__dict__ |= {**values, **changes}
        made.append(session)
        return session

    yield make
    for session in made:
        if session.lookout:
            session.lookout.close()


@pytest.mark.parametrize("hides", [False, True])
def test_who_hides_the_own_name_tells_it_nobody(make_session, hides):
    told = []
    session = make_session(
        SimpleNamespace(local_epoch=3, reach=SimpleNamespace(waits_for_itself=False)),
        board=SimpleNamespace(publish=told.append),
        spec=SimpleNamespace(name="ann", hide_name=hides),
        peer=SimpleNamespace(peer_id=PeerID(b"\x12\x20" + bytes(32)), client_mode=True),
        compute=SimpleNamespace(found=SimpleNamespace(name="Tesla T4")),
        tally=SimpleNamespace(totals=SimpleNamespace(samples=0), rounds=RoundCounts()),
    )  # fmt: skip
    Session.publish(session)
    assert told[0].hidden is hides and (told[0].name == "ann") is not hides
    session.optimizer = None  # there is nothing to end


def test_the_download_of_the_state_is_watched(make_session):
    """Whoever has set a limit to what goes over the line has it from the first byte on."""
    told = Events()
    session = make_session(Swarm(join=lambda swarm: told.wait("traffic")["received"] == 5), emit=told)
    session._join(threading.Event())
    told.wait("state_loaded")
    session.lookout.close()
    assert session.home.was_here(RUN.fingerprint)


def test_whoever_leaves_does_not_wait_for_the_download(make_session):
    leave = threading.Event()

    def join(swarm):
        swarm.on_download(1, 1000)
        leave.set()
        swarm.on_download(2, 1000)
        raise AssertionError("it goes on")

    with pytest.raises(Left):
        make_session(Swarm(join))._join(leave)


def test_a_look_that_fails_ends_no_other(make_session, capsys):
    def fails():
        raise TimeoutError("the DHT is busy")

    session = make_session(Swarm(), board=SimpleNamespace(fetch=fails))
    session.optimizer.traffic = fails
    session.lookout = Lookout(session)
    session.optimizer.cut_off = "nobody answers"
    session.emit.wait("cut_off")
    session.optimizer.cut_off = None
    session.emit.wait("back")
    session.optimizer.traffic = lambda: (8, 9)
    assert session.emit.wait("traffic") == {"sent": 8, "received": 9}
    session.lookout.close()
    assert capsys.readouterr().err.count("Traceback") == 1


def test_whoever_gets_no_model_is_told_so_once(make_session):
    session = make_session(Swarm())
    session.optimizer.states_asked_in_vain = lookout_module.VAIN - 1
    session.lookout = Lookout(session)
    session.emit.wait("swarm")
    assert not [fields for event, fields in session.emit.seen if event == "warning"]
    session.optimizer.states_asked_in_vain = lookout_module.VAIN
    assert "none of them has given this machine their model" in session.emit.wait("warning")["message"]
    session.optimizer.states_asked_in_vain = 0
    session.lookout.close()
    assert [event for event, _ in session.emit.seen].count("warning") == 1


@pytest.mark.parametrize(("theirs", "share"), [(100, 0.75), (0, None), (None, 1.0)])
def test_a_share_is_told_when_the_others_have_told_theirs(make_session, theirs, share):
    """Those who have just come say 0 until their first record after it."""
    other = SimpleNamespace(fingerprint=RUN.fingerprint, total_samples=theirs, samples_per_second=2.0)
    tally = SimpleNamespace(totals=SimpleNamespace(samples=300))
    board = SimpleNamespace(fetch=lambda: {} if theirs is None else {"other": other})
    session = make_session(Swarm(), tally=tally, board=board)
    session.lookout = Lookout(session)
    told = session.emit.wait("swarm")
    assert (told["share"], told["rank"]) == (share, 1)


def test_what_went_over_the_line_last_is_told_too(make_session):
    session = make_session(Swarm())
    session.lookout = Lookout(session)
    session.emit.wait("traffic")
    session.lookout._stop.set()
    session.lookout._thread.join(60)
    session.optimizer.traffic = lambda: (8, 9)
    session.lookout.close()
    assert session.emit.wait("traffic") == {"sent": 8, "received": 9}


def test_a_line_that_was_dead_and_memory_that_was_small_before_the_training_mean_nothing(make_session, monkeypatch):
    looked = threading.Event()
    monkeypatch.setattr(lookout_module, "memory_gb", lambda: looked.set() or 1.0)
    session = make_session(Swarm())
    session.optimizer.cut_off_for = 1e9
    session.lookout = Lookout(session)
    for sent in range(3):  # looks
        session.optimizer.traffic = lambda sent=sent: (sent, 0)
        while session.emit.wait("traffic")["sent"] != sent:
            pass
    assert not session.lookout.must_dial_anew and not looked.is_set()
    session.trainer = SimpleNamespace(samples_per_second=0.0)
    assert looked.wait(60)
    wait_until(lambda: session.lookout.must_dial_anew)


@pytest.mark.parametrize(
    ("silent_for", "waits_for_itself", "why_afresh", "anew"),
    [
        (0.0, False, "", False),
        (200.0, False, "", True),  # the line has been dead for long
        (200.0, True, "", False),  # a clock that is wrong, or no token: a new start mends neither
        (0.0, False, "The clock is right again.", True),
    ],
)
def test_a_worker_begins_anew_only_where_that_mends_something(
    make_session, silent_for, waits_for_itself, why_afresh, anew
):
    """All peers of a run wait for an authority that is away: if all began anew, nobody would have the model."""
    session = make_session(Swarm(), trainer=SimpleNamespace(samples_per_second=0.0))
    session.optimizer.reach = SimpleNamespace(
        known_peers=lambda: [], waits_for_itself=waits_for_itself, why_afresh=why_afresh
    )
    session.optimizer.cut_off, session.optimizer.cut_off_for = "the clock", silent_for
    session.lookout = Lookout(session)
    session.emit.wait("cut_off")
    session.lookout.close()
    assert session.lookout.must_dial_anew is anew and bool(session.lookout.why_anew) is anew


def test_leaving_ends_the_wait_for_statistics(make_session, monkeypatch):
    """A step that waits for them holds up the loop, which alone looks whether to stop."""
    orders = SimpleNamespace(leave=threading.Event(), finish_at=None)
    session = make_session(Swarm())

    class Loop:
        def __init__(self, *_, **__): ...

        def train(self, should_stop):
            orders.leave.set()
            assert session.optimizer.stops_waiting.wait(60) and should_stop()

        def tell_steps(self): ...

    monkeypatch.setattr(session_module, "Trainer", Loop)
    session.train(orders)


def test_a_machine_whose_key_another_one_had_first_takes_a_new_one_and_begins_afresh(make_session, monkeypatch):
    """After the step under way, and its samples stay counted."""
    subkey = RSASignatureValidator().local_public_key

    def theirs(*_, **__):
        """It was here before, and still writes; its clock is a little ahead, or we would wait for SKEW."""
        now = get_dht_time()
        record = [b"t" * 8, 0.0, now + 0.9 * SKEW]
        return SimpleNamespace(value={subkey: ValueWithExpiration(record, now + 60.0)})

    monkeypatch.setattr(lookout_module, "SWARM_EVERY", 0.1)
    dht = SimpleNamespace(get=theirs, store=lambda *_, **__: True)
    orders = SimpleNamespace(leave=threading.Event(), finish_at=None)
    session = make_session(Swarm(), peer=SimpleNamespace(dht=dht, peer_id="us", admission=Admission()))
    session.membership.identity_path = str(session.home.identity)
    session.home.identity.write_bytes(b"the key")

    class Loop:
        def __init__(self, *_, callbacks, **__):
            self.tell = callbacks[0]

        def train(self, should_stop):
            assert "takes a key of its own" in session.emit.wait("warning")["message"]
            assert session.lookout.must_change_key and not should_stop(), "the step goes on"
            self.tell.wants_renewal = bool(session.lookout.why_renew)  # as at its end
            assert should_stop()

        def tell_steps(self): ...

    monkeypatch.setattr(session_module, "Trainer", Loop)
    with pytest.raises(Renew):
        session.train(orders)
    assert session.home.identity.with_name("identity.key.shared").read_bytes() == b"the key"
    assert not session.home.identity.exists(), "the next worker makes another"


@pytest.mark.parametrize("ends", ["by a dead line", "by an error", "well"])
def test_however_the_training_ends_it_is_told_what_became_of_the_last_steps(make_session, monkeypatch, ends):
    """Its line dead, a worker begins anew; the step before, which everybody has, would count for nobody."""
    orders, told = SimpleNamespace(leave=threading.Event(), finish_at=None), []
    session = make_session(Swarm())
    session.tally.end = lambda: told.append("counted")

    class Loop:
        def __init__(self, *_, **__): ...

        def train(self, should_stop):
            if ends == "by an error":
                raise OSError("the disk")
            session.lookout.must_dial_anew = ends == "by a dead line"
            if ends == "well":
                orders.leave.set()

        def tell_steps(self):
            told.append("the last steps")

    monkeypatch.setattr(session_module, "Trainer", Loop)
    try:
        session.train(orders)
    except (OSError, SwarmError):
        assert told == ["counted"] and ends != "well"
    else:
        assert told == ["the last steps", "counted"] and ends == "well"
    orders.leave.set()  # a thread waits for it


@pytest.mark.slow
def test_a_real_worker_tells_its_traffic_and_leaves_in_the_middle_of_the_download(tmp_path):
    with demo_volunteer(tmp_path) as volunteer:
        volunteer.wait_epoch(1)
        spec = WorkerSpec(
            run=RUN.model_dump(mode="json"),
            initial_peers=volunteer.maddrs,
            client_mode=True,
            home=str(tmp_path / "home"),
            threads=1,
            max_mbps=0.05,  # minutes for the state
        )
        with Supervisor(spec, log_path=tmp_path / "newcomer.log", restart=False) as newcomer:
            seen = []
            while (event := newcomer.next_event(timeout=120)) is not None:
                seen.append(event["event"])
                if seen.count("downloading") > 3 and "traffic" in seen:
                    break
            assert newcomer.leave(timeout=120), (tmp_path / "newcomer.log").read_text()[-2000:]
    assert "traffic" in seen and "state_loaded" not in seen


def test_that_nobody_can_be_called_is_told_once(make_session):
    progress = SwarmProgress(num_peers=2, swarm_samples=8, own_samples=8, uncallable=1)
    optimizer = SimpleNamespace(progress=lambda: progress, local_epoch=3, target_batch_size=64)
    session = make_session(optimizer)
    session.publish = lambda *_: None
    session.reading = SimpleNamespace(keep=lambda: None, counts=dict)
    session.tally = SimpleNamespace(count=lambda report: 8, samples=8, rounds=RoundCounts())
    trainer = SimpleNamespace(
        optimizer=optimizer, samples_per_second=9.0, microbatches_not_finite=0, microbatches_too_large=0
    )
    tell = Tell(session)
    report = StepReport(3, 8, 1, 0.0, 1.0, 0, 0, expected=2)
    for _ in range(2):
        tell._last_step = 0.0
        tell.on_microbatch(trainer, 0.5, 8)
        tell.on_epoch(trainer, report, 0.5)
    session.emit("end")
    session.emit.wait("end")
    told = [fields["message"] for kind, fields in session.emit.seen if kind == "warning"]
    assert len(told) == 1 and "Nobody in this run can be called: this machine and the other one only call" in told[0]


@pytest.mark.parametrize("is_sent_away", [True, False])
def test_who_is_sent_away_says_goodbye_and_counts_its_last_step(make_session, is_sent_away):
    order = []
    optimizer = SimpleNamespace(comes_back=None, why_too_slow="", shutdown=lambda: order.append("goodbye"))
    session = make_session(
        optimizer,
        trainer=SimpleNamespace(tell_steps=lambda: order.append("steps")),
        board=SimpleNamespace(publish=lambda record: None),
        reading=SimpleNamespace(close=lambda: None),
        verification=None,
        launched=SimpleNamespace(close=lambda: None),
        peer=None,
        tally=SimpleNamespace(samples=5, epochs=1),
        _leave=threading.Event(),
    )
    if is_sent_away:
        session.membership.refused.set()
    session.close()
    assert optimizer.comes_back is not is_sent_away and order == ["goodbye", "steps"]
    assert session.emit.wait("left")["total_samples"] == 5
