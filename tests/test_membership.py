"""A worker's right to be in its run: asked for before anything is dialled, and lost with the reason."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hivemind.p2p import PeerID

from tests.hub import Hub
from tests.local_authority import RUN, add_person, make_authority, served, this_hub
from volunteer_kit.auth.access_token import BanList
from volunteer_kit.auth.authority_client import AuthorityRefused
from volunteer_kit.auth.identity import LoginError
from volunteer_kit.auth.moderation import Allowlist
from volunteer_kit.runs import RunConfig, load_run
from volunteer_kit.session.membership import Membership


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """At work, with its address; "eve" is banned."""
    made = make_authority(tmp_path_factory.mktemp("authority"), allowlist=Allowlist.of(is_open=True))
    with Hub() as hub, this_hub(hub), served(made) as url:
        tokens = {name: add_person(hub, name) for name in ("ada", "eve")}
        made.app.state.moderators.ban("mona", "eve", "a test", "api")
        yield SimpleNamespace(url=url, tokens=tokens, made=made)
    made.storage.close()


@pytest.fixture
def run(authority) -> RunConfig:
    about = {"url": authority.url, "public_key": authority.made.public_key, "open": True}
    return RunConfig.model_validate({**load_run("demo").model_dump(mode="json"), "authority": about})


def test_a_run_without_an_authority_asks_nobody(tmp_path):
    membership = Membership(load_run("demo"), str(tmp_path / "key"), None)
    membership.ask()
    assert membership.admission.is_open and membership.trust is None and not (tmp_path / "key").exists()
    membership.close()


def test_who_is_let_in_shows_a_token_of_its_own_peer(run, authority, tmp_path):
    membership = Membership(run, str(tmp_path / "key"), authority.tokens["ada"])
    membership.ask()
    token = membership._authorizer.token
    assert token.username == "ada" and token.run_id == RUN and membership.admission.own_token
    assert membership.admission.is_admitted(PeerID(token.peer_id)), "the key's own peer id, and known to ourselves"
    membership.close()


def test_nobody_logged_in_is_told_how(run, tmp_path):
    with pytest.raises(LoginError, match="nobody is logged in.*\n1. Join again"):
        Membership(run, str(tmp_path / "key"), None)


def test_who_is_banned_hears_why_before_anything_is_dialled(run, authority, tmp_path):
    membership = Membership(run, str(tmp_path / "key"), authority.tokens["eve"])
    with pytest.raises(AuthorityRefused, match="a test") as refused:
        membership.ask()
    assert refused.value.kind == "banned" and not membership.admission.own_token
    membership.close()


def test_who_is_banned_later_hears_why_as_soon_as_the_list_names_it(run, authority, tmp_path):
    membership = Membership(run, str(tmp_path / "key"), authority.tokens["ada"])
    membership.ask()
    account = membership._authorizer.token.account
    membership._look_for_ourselves(BanList(7, frozenset({b"x" * 16})))
    assert not membership.refused.is_set(), "somebody else is"
    authority.made.app.state.moderators.ban("mona", "ada", "two machines in a cupboard", "api")
    membership._look_for_ourselves(BanList(8, frozenset({account})))
    assert membership.refused.is_set() and "two machines in a cupboard" in membership.why
    authority.made.app.state.moderators.unban("mona", "ada", "api")
    membership.close()


def test_without_a_home_the_key_ends_with_the_stay(run, authority):
    membership = Membership(run, None, authority.tokens["ada"])
    path = Path(membership.identity_path)
    assert path.exists()
    membership.close()
    assert not path.exists()
