"""Whether those who are here train the same run, and what is said if not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from volunteer_kit import __version__
from volunteer_kit.runs import PROTOCOL_VERSION, load_run
from volunteer_kit.session.same_run import check_same_run
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.records.kits import kit_words

RUN = load_run("demo")
OURS = SimpleNamespace(fingerprint=RUN.fingerprint, protocol=PROTOCOL_VERSION, kit=__version__)
OTHER = SimpleNamespace(fingerprint="f" * 32, protocol=PROTOCOL_VERSION, kit=__version__)
NEWER = SimpleNamespace(fingerprint="e" * 32, protocol=PROTOCOL_VERSION + 1, kit="99.0")


@pytest.mark.parametrize(
    ("records", "was_here", "outcome"),
    [
        ([], False, None),
        ([OURS], False, None),
        ([OTHER, NEWER, OURS], False, None),  # one of ours is enough
        ([OTHER], False, "wrong_run"),
        ([NEWER], False, "outdated"),
        ([NEWER, NEWER], False, "outdated"),
        ([OTHER, NEWER], False, "wrong_run"),
        ([OTHER, OTHER], True, "warning"),  # back from an outage, before the others are
        ([NEWER], True, "warning"),
    ],
)
def test_peers_of_another_run_are_told_and_send_nobody_away_who_was_here(records, was_here, outcome):
    if outcome in (None, "warning"):
        told = check_same_run(RUN, records, was_here=was_here)
        assert told is None if outcome is None else RUN.run_id in told
    else:
        with pytest.raises(SwarmError) as caught:
            check_same_run(RUN, records, was_here=was_here)
        assert caught.value.kind == outcome


@pytest.mark.parametrize(
    ("theirs", "own", "words"),
    [
        (["0.2.0"], "0.1.9", "Your kit is older: the others have volunteer_kit 0.2.0, this machine has 0.1.9."),
        (["0.1.0"], "0.1.10", "The others' kit is older: they have volunteer_kit 0.1.0, this machine has 0.1.10."),
        ([""], "0.1.1", "The others' kit is older: they have volunteer_kit, one of before 0.1.1"),
        (["0.3.0", "0.2.0", "0.3.0"], "0.1.0", "have volunteer_kit 0.3.0"),
        (["1.0", "1.0.0+local"], "1.0.0", ""),
        (["0.2.0", "0.1.0"], "0.1.0", ""),  # one of ours is enough: the kit is not the cause
        ([], "0.1.0", ""),
    ],
)
def test_it_is_said_which_kit_is_older(theirs, own, words):
    told = kit_words(theirs, own)
    assert told.startswith(words) if words.startswith(("Your", "The")) else words in told and bool(told) == bool(words)
    assert not told or "1. Install the version of the run's host" in told


@pytest.mark.parametrize(("kit", "words"), [("99.0", "Your kit is older"), ("0.0.1", "The others' kit is older")])
def test_two_kits_of_one_protocol_and_other_settings_are_told_which_is_older(kit, words):
    other = SimpleNamespace(fingerprint="f" * 32, protocol=PROTOCOL_VERSION, kit=kit)
    with pytest.raises(SwarmError, match=words) as caught:
        check_same_run(RUN, [other], was_here=False)
    assert caught.value.kind == "wrong_run" and "ask the host for the current run file" in str(caught.value)
