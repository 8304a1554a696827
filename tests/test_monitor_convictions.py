"""What a monitor does with a conviction: it reports it until the authority has heard it, and tells it once."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from hivemind.p2p import PeerID

from tests.convicting import strike_of
from tests.waiting import wait_until
from volunteer_kit.auth.access_token import BanList, account_digest
from volunteer_kit.auth.authority_client import AuthorityRefused
from volunteer_kit.auth.evidence import CAUSES, Evidence
from volunteer_kit.dashboard.happenings import Names, sentence
from volunteer_kit.monitor import convictions
from volunteer_kit.monitor.convictions import Convictions
from volunteer_kit.monitor.notes import Notes
from volunteer_kit.monitor.people import Bans
from volunteer_kit.swarm.verification.enforcement import Case

A, B, C = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in (1, 2, 3))
CASE = Case(A, account_digest("run", "Mallory"), {one: [strike_of(A)] for one in (B, C)}, 3)


@pytest.fixture
def notes(tmp_path):
    notes = Notes(tmp_path / "journal.sqlite")
    yield notes
    notes.close()


@pytest.fixture
def watch(notes, tmp_path, monkeypatch):
    """Starts one whose authority answers as `answers` say. :returns: what hands it a conviction, and what was sent"""
    monkeypatch.setattr(convictions, "ConvictionBoard", lambda *_: None)
    made, hand = [], []

    def keeper(board, admission, peers, on_convicted):
        hand.append(on_convicted)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(convictions, "ConvictionKeeper", keeper)

    def start(*answers, is_open: bool = False) -> SimpleNamespace:
        left, sent, answered = list(answers), [], threading.Event()

        def report(evidence: str, votes: int) -> str:
            sent.append((Evidence.model_validate_json(evidence), votes))
            answer = left.pop(0) if left else None
            if not left:
                answered.set()
            if isinstance(answer, Exception):
                raise answer
            return "done"

        membership = None if is_open else SimpleNamespace(report_conviction=report)
        member = SimpleNamespace(
            membership=membership, admission=None, run_key="run", peer=SimpleNamespace(dht=None),
            board=SimpleNamespace(fetch=dict),
        )  # fmt: skip
        bans = Bans(tmp_path / "bans.json", "run", notes)
        made.append(Convictions(member, notes, lambda peer: "Mallory", bans.explain, report_every=0.02))
        return SimpleNamespace(hand=hand[-1], sent=sent, answered=answered, bans=bans, waiting=made[-1]._waiting)

    yield start
    for one in made:
        one.close()


def refused(kind: str) -> AuthorityRefused:
    return AuthorityRefused(kind, f"{kind}.\n1. Wait.")


def test_a_conviction_is_reported_until_the_authority_is_back(watch):
    one = watch(refused("away"), refused("down"), OSError("the disk is away"), "done")
    one.hand(CASE)
    assert one.answered.wait(60)
    wait_until(lambda: not one.waiting)
    evidence, votes = one.sent[-1]
    assert len(one.sent) == 4 and (votes, evidence.others, len(evidence.signatures)) == (2, 3, 2)


@pytest.mark.parametrize("kind", ["already", "set_aside", "nobody", "minority", "not_monitor"])
def test_a_judgement_of_the_authoritys_is_not_asked_for_again(watch, notes, kind):
    one = watch(refused(kind))
    one.hand(CASE)
    assert one.answered.wait(60)
    wait_until(lambda: not one.waiting)
    one.bans.take(BanList(1, frozenset({CASE.account})))
    assert ("reason" in notes.do("events", 1)[0]["detail"]) == (kind == "already")
    assert len(one.sent) == 1 and notes.do("counts").get("warning", 0) == (kind not in ("already", "set_aside"))


def test_a_ban_by_the_swarm_is_told_with_its_cause_when_it_is_there(watch, notes):
    one = watch("done")
    notes.do("set_leaderboard", [{"username": "Mallory", "samples": 3}])
    one.hand(CASE)
    assert one.answered.wait(60) and notes.do("counts").get("banned", 0) == 0
    one.bans.take(BanList(1, frozenset({CASE.account})))
    (event,) = notes.do("events", 10)
    reason = f"2 of the 3 other accounts found that {CAUSES['gradient']} (step 41)"
    assert sentence(event, Names(())) == f"Mallory was banned by the swarm: {reason}"
    one.bans.take(BanList(2))
    one.bans.take(BanList(3, frozenset({CASE.account})))
    assert sentence(notes.do("events", 10)[0], Names(())) == "Mallory may not take part any more", "a moderator's"


def test_in_an_open_run_it_is_told_alone(watch, notes):
    one = watch(is_open=True)
    one.hand(CASE)
    (event,) = notes.do("events", 10)
    assert event["kind"] == "banned" and "Mallory was shut out by the swarm: 2 of the 3" in sentence(event, Names(()))
