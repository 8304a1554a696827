"""What a host writes and is told: run file, settings, systemd unit, `host init`."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import threading
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from volunteer_kit.auth.access_token import KeyFolder
from volunteer_kit.cli import _plain_errors
from volunteer_kit.cli_machine import add_verbs
from volunteer_kit.host import HostError, HostSettings
from volunteer_kit.host.door import to_give_out
from volunteer_kit.host.folder import HostFolder
from volunteer_kit.host.init import RECIPES, Answers, ask_all, check, text_of, write
from volunteer_kit.host.parts import AUTHORITY, DASHBOARD, MONITOR, other_parts
from volunteer_kit.host.ports import gets_free
from volunteer_kit.host.run_file import filled_in, read_given
from volunteer_kit.host.service import service_unit
from volunteer_kit.host.settings import authority_url, dashboard_address
from volunteer_kit.run_reader import RUN_FILES, RunError
from volunteer_kit.runs import AuthorityConfig, load_run

KEY = "ed25519:" + "A" * 43
URL = "https://run.example.org"
PEERS = ["/ip4/203.0.113.5/tcp/31337/p2p/QmA", "/ip6/2001:db8::1/tcp/31337/p2p/QmA"]
DEMO = (RUN_FILES / "demo.yaml").read_text()

APP = typer.Typer()
add_verbs(APP, _plain_errors)

# --- its folder ---


def test_a_databases_password_is_for_its_owner_only(tmp_path):
    url, before = "postgresql://ada:S3cret@db/run", os.umask(0o022)
    try:
        (tmp_path / "host.json").write_text("{}")  # of an earlier version, which everybody could read
        folder, settings = HostFolder(tmp_path), HostSettings(database=url)
        folder.save({"database": url})
        assert (tmp_path / "host.json").stat().st_mode & 0o777 == 0o600 and folder.read() == {"database": url}
        assert [path.name for path in tmp_path.iterdir()] == ["host.json"]
    finally:
        os.umask(before)
    parts = {part.name: part for part in other_parts(folder, settings, PEERS)}
    assert not any("S3cret" in word for part in parts.values() for word in part.command)
    assert dict(parts[AUTHORITY].environment) == {"VOLUNTEER_KIT_DATABASE": url}, "it reads it there"
    assert not parts[MONITOR].environment and not parts[DASHBOARD].environment


@pytest.mark.parametrize(
    ("listens", "here"),
    [
        ("/ip4/0.0.0.0/tcp/31337", "/ip4/127.0.0.1/tcp/31337/p2p/QmA"),
        ("/ip6/::/tcp/31337", "/ip6/::1/tcp/31337/p2p/QmA"),
        ("/ip4/192.168.1.5/tcp/31337", "/ip4/192.168.1.5/tcp/31337/p2p/QmA"),
    ],
)
def test_the_monitor_reaches_the_first_peer_without_the_router(tmp_path, listens, here):
    """Its public address may lead nowhere from within: many routers, and containers, have no way back in."""
    settings = HostSettings(host_maddrs=(listens, "/ip4/0.0.0.0/udp/31337/quic-v1"))
    parts = {part.name: part for part in other_parts(HostFolder(tmp_path), settings, PEERS)}
    command = parts[MONITOR].command
    assert command[command.index("--initial-peers") + 1].split(",") == [here, *PEERS]


# --- the run file of volunteers ---

BLOCK = """
authority:  # who may join
  organization: an-org  # its members
  url: https://old.example.org
  # a word about keys
  public_key: >-
    ed25519:old
    ed25519:older

"""


@pytest.mark.parametrize(
    "extra",
    [
        "",
        BLOCK,
        "authority: {organization: an-org, url: https://old.example.org}\n",
        "initial_peers: [/ip4/1.2.3.4/tcp/1/p2p/Qm1]  # the old one\n" + BLOCK,
        BLOCK + "initial_peers:\n- /ip4/1.2.3.4/tcp/1/p2p/Qm1\n\n# the end\n",
        "authority:\n",
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_filling_in_changes_these_lines_only(tmp_path, extra, first):
    text = extra + DEMO if first else DEMO + extra
    done = filled_in(text, URL, KEY, PEERS)
    (tmp_path / "run.yaml").write_text(done)
    config = load_run(tmp_path / "run.yaml")
    assert (config.authority.url, config.authority.public_key) == (URL, KEY)
    assert list(config.initial_peers) == PEERS
    assert config.fingerprint == load_run("demo").fingerprint
    assert config.authority.organization == ("an-org" if "an-org" in extra else None)
    for comment in re.findall(r"#.*", text):
        assert comment in done or comment == "# the old one"
    assert filled_in(done, URL, KEY, PEERS) == done
    without = yaml.safe_load(filled_in(done, URL, KEY, []))
    assert "initial_peers" not in without


def test_a_file_in_braces_is_filled_in_too(tmp_path):
    (tmp_path / "run.yaml").write_text(filled_in(str(yaml.safe_load(DEMO)), URL, KEY, PEERS))
    assert list(load_run(tmp_path / "run.yaml").initial_peers) == PEERS


def test_a_file_without_address_and_key_is_good_for_the_host(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(DEMO + "authority:\n  organization: an-org\n")
    text, config = read_given(path, URL, KEY)
    assert config.authority == AuthorityConfig(url=URL, public_key=KEY, organization="an-org")
    assert read_given(path, None, KEY)[1].authority is None and text == path.read_text()


def test_mistakes_are_told_with_the_lines_of_the_hosts_own_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        DEMO.replace("target_batch_size: 256", "target_batch_size: many") + "authority: {organisation: x}\n"
    )
    with pytest.raises(RunError) as told:
        read_given(path, URL, KEY)
    line = next(number for number, text in enumerate(path.read_text().splitlines(), 1) if "many" in text)
    assert f"{path}, line {line}:" in str(told.value) and "'organization'" in str(told.value)


# --- the address of the authority ---


@pytest.mark.parametrize(
    ("settings", "result"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"port": 9000}, "http://127.0.0.1:9000"),
        ({"announce_maddrs": ("/ip4/127.0.0.1/tcp/1",)}, "http://127.0.0.1:8000"),
        ({"public_url": "https://run.example.org/", "behind_proxy": True}, URL),
        ({"public_url": "https://run.example.org:8443", "tls_cert": "c", "tls_key": "k"}, URL + ":8443"),
        ({"public_url": "http://127.0.0.1:7000"}, "http://127.0.0.1:7000"),
        ({"public_url": "http://localhost:7000"}, "http://localhost:7000"),
        ({"public_url": "https://RUN.Example.org:443", "behind_proxy": True}, URL),
        ({"public_url": "https://bücher.example", "behind_proxy": True}, "https://xn--bcher-kva.example"),
        ({"public_url": "https://203.0.113.5:8443/", "behind_proxy": True}, "https://203.0.113.5:8443"),
        ({"public_url": "https://[2001:DB8::1]", "behind_proxy": True}, "https://[2001:db8::1]"),
    ],
)
def test_addresses_that_do(settings, result, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("c", "k"):
        Path(name).touch()
    assert authority_url(HostSettings(**settings)) == result


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"announce_maddrs": ("/ip4/203.0.113.5/tcp/31337",)}, ["caddy", "--no-authority", "--behind-proxy"]),
        ({"public_url": "https://[2001:db8::1]"}, ["--from [2001:db8::1] ", "--public-url https://[2001:db8::1] "]),
        ({"public_url": "http://run.example.org"}, ["is not https", "--from run.example.org --to 127.0.0.1:8000"]),
        ({"public_url": URL, "port": 9000}, ["who serves https", "127.0.0.1:9000", "--tls-cert"]),
        ({"public_url": "run.example.org"}, ["should look like"]),
        ({"public_url": URL + "/path", "behind_proxy": True}, ["should look like"]),
        ({"public_url": URL, "tls_cert": "/c"}, ["belong together"]),
        ({"public_url": URL, "tls_cert": "/nowhere/c", "tls_key": "/nowhere/k"}, ["no file /nowhere/c"]),
    ],
)
def test_what_would_show_logins_to_strangers_is_told_with_the_way_out(settings, words):
    with pytest.raises(HostError) as told:
        authority_url(HostSettings(**settings))
    assert all(word in str(told.value) for word in words), told.value


WRONG = [
    "https://x.org#frag", "https://x.org?", "https://x.org#", "https://x.org/?q", "https://ada:S3cret@x.org",
    "https://ada@x.org", "https://x y.org", "https://x.org\\evil", 'https://x.org"', "https://x.org'", "https://x.org;x",
    "https://x.org:0", "https://x.org:99999", "https://x.org:", "https://x.org:80x", "https://[::1", "https://[::1]x:80",
    "https://[fe80::1%eth0]", "https://[127.0.0.1]", "https://", "https:///x", "https://-x.org", "https://x..org",
    "https://256.1.1.1", "https://2130706433", "https://0x7f.1", "https://x_y.org", "https://" + "a" * 64 + ".org",
    "ftp://x.org", "//x.org", "https:x.org", " https://x.org", "https://x.org\n", "https://x\t.org", "https://x.org/<b>",
]  # fmt: skip


@pytest.mark.parametrize("url", WRONG)
def test_an_address_that_cannot_work_is_told_with_one_that_can(url):
    for of_an_authority in (lambda: authority_url(HostSettings(public_url=url, behind_proxy=True)),
                            lambda: check("address", url, Answers())):  # fmt: skip
        with pytest.raises(HostError, match="should look like this: --public-url https://run.example.org") as told:
            of_an_authority()
        assert "S3cret" not in str(told.value)
    if url.partition("://")[2].endswith((".org#", ".org?", "#frag", "?q")):
        return  # a link has those
    with pytest.raises(HostError, match="--dashboard-url") as told:
        dashboard_address(HostSettings(dashboard_url=url))
    assert "S3cret" not in str(told.value)
    with pytest.raises(HostError):
        check("help_url", url, Answers())
    with pytest.raises(ValueError, match="authority|address|https"):
        AuthorityConfig(url=url, public_key=KEY, open=True)


def test_the_authority_is_at_127_0_0_1_only():
    with pytest.raises(HostError, match="Type: --public-url http://127.0.0.1:8000"):
        authority_url(HostSettings(public_url="http://[::1]:8000"))


@pytest.mark.parametrize("url", ["https://stats.example.org/run/", "http://192.168.1.5:8001", "https://chat.org/#a?b=c"])
def test_a_link_may_have_a_path(url):
    assert dashboard_address(HostSettings(dashboard_url=url)) == url
    check("help_url", url.replace("http:", "https:"), Answers())


def test_a_port_that_is_being_given_up_is_waited_for():
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    assert not gets_free(port, "127.0.0.1", within=0)
    threading.Timer(0.3, taken.close).start()
    assert gets_free(port, "127.0.0.1")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as other:
        taken_by_ip6 = other.getsockname()[1]
        assert not gets_free(taken_by_ip6, within=0) and not gets_free(taken_by_ip6, "::1", within=0)
        assert gets_free(taken_by_ip6, "127.0.0.1", within=0)


def test_what_was_said_once_is_remembered_and_can_be_said_anew():
    first = HostSettings(host_maddrs=("/ip4/0.0.0.0/tcp/1",), port=8000, tls_cert="c", tls_key="k", public_url=URL)
    saved = {**first.__dict__, "host_maddrs": list(first.host_maddrs), "run_id": "x", "dashboard_port": "no number"}
    assert HostSettings.remembered(saved) == first
    assert HostSettings().over(first) == first
    assert HostSettings(port=9000).over(first).port == 9000
    proxied = HostSettings(behind_proxy=True).over(first)
    assert proxied.behind_proxy and proxied.tls_cert is None and proxied.public_url == URL


@pytest.mark.parametrize(
    ("maddrs", "url", "given"),
    [
        (["/ip4/127.0.0.1/tcp/1/p2p/Q", "/ip4/192.168.0.2/tcp/1/p2p/Q"], "http://127.0.0.1:1", [0]),
        (["/ip4/127.0.0.1/tcp/1/p2p/Q", "/ip4/192.168.0.2/tcp/1/p2p/Q"], URL, [1]),
        (["/ip4/127.0.0.1/tcp/1/p2p/Q"], URL, [0]),
        (["/dns4/run.example.org/tcp/1/p2p/Q", "/ip6/::1/tcp/1/p2p/Q"], URL, [0]),
    ],
)
def test_volunteers_get_addresses_that_they_can_use(maddrs, url, given):
    assert to_give_out(maddrs, url) == [maddrs[index] for index in given]


def test_the_monitor_is_told_where_checkpoints_and_metrics_go(tmp_path):
    def monitor(**settings):
        saved = HostSettings.remembered(json.loads(json.dumps(HostSettings(**settings).__dict__)))
        return other_parts(HostFolder(tmp_path), saved, PEERS)[1]

    plain = monitor()
    assert not plain.needs_token and not {"--push-to", "--trackio", "--checkpoint-every"} & set(plain.command)
    full = monitor(push_to="org/model", checkpoint_every=50, tracker="wandb")
    assert full.needs_token and full.command[-5:] == (
        "--push-to", "org/model", "--checkpoint-every", "50", "--wandb"
    )  # fmt: skip
    assert not HostSettings(push_to="").over(HostSettings(push_to="org/model")).push_to


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--trackio", "--wandb"], "one tracker"), (["--push-to", "model"], "ORG/NAME")],
)
def test_where_they_cannot_go_is_told(words, told):
    done = CliRunner().invoke(APP, ["host", "demo", *words], catch_exceptions=False)
    assert done.exit_code == 2 and told in done.stderr


def test_the_options_reach_the_host(monkeypatch):
    given = []
    monkeypatch.setattr("volunteer_kit.host.host_run", lambda run, settings, **_: given.append(settings))
    words = ["--push-to", "org/model", "--checkpoint-every", "50", "--trackio"]
    assert CliRunner().invoke(APP, ["host", "demo", *words], catch_exceptions=False).exit_code == 0
    assert given == [HostSettings(push_to="org/model", checkpoint_every=50, tracker="trackio")]


# --- after a reboot ---


def test_the_unit_starts_the_same_again():
    unit = service_unit("my run", ["run file.yaml", "--database", "a%b$c"], user="ada", folder=Path("/srv/a%b"))
    assert "User=ada" in unit and "WorkingDirectory=/srv/a%%b" in unit and "volunteer-kit-my-run.service" in unit
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    words = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(command)]
    assert words[-3:] == ["run file.yaml", "--database", "a%b$c"] and words[3:5] == ["volunteer_kit.cli", "host"]


def test_the_unit_is_printed_with_the_words_of_the_call(monkeypatch):
    words = ["host", "demo", "--port", "9000", "--install-service"]
    monkeypatch.setattr("sys.argv", ["volunteer-kit", *words])
    done = CliRunner().invoke(APP, words, catch_exceptions=False)
    assert done.exit_code == 0 and "volunteer_kit.cli host demo --port 9000\n" in done.stdout


def test_bad_input_is_one_message_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(APP, ["host", "demo", "--public-url", "http://a.org"], catch_exceptions=False)
    assert done.exit_code == 2 and "caddy" in done.stderr
    done = CliRunner().invoke(APP, ["host", "init", "--yes", "--name", "../x"], catch_exceptions=False)
    assert done.exit_code == 2 and "letters, digits" in done.stderr and not list(tmp_path.iterdir())


# --- host init ---


@pytest.mark.parametrize("model", RECIPES)
@pytest.mark.parametrize("who", ["an-org", "open", "ada,bob"])
def test_what_init_writes_is_a_run(tmp_path, monkeypatch, model, who):
    monkeypatch.chdir(tmp_path)
    words = ["host", "init", "sub/my.yaml", "--yes", "--name", "r1", "--model", model, "--who", who]
    words += ["--help-url", "https://x.y/z"]
    words += ["--moderators", "ada, bob"]
    done = CliRunner().invoke(APP, [*words, "--address", URL], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    config = load_run("sub/my.yaml")
    assert config.run_id == "r1" and config.help_url == "https://x.y/z" and config.authority.url == URL
    assert config.authority.public_key == KeyFolder("r1-host/keys").root_public
    assert "caddy" in done.output and f"volunteer-kit host sub/my.yaml --public-url {URL} --behind-proxy" in done.output
    assert config.authority.organization == ("an-org" if who == "an-org" else None)
    assert config.authority.moderators == ("ada", "bob")
    assert config.authority.users == (("ada", "bob") if "," in who else ())
    assert config.authority.open == (who == "open")
    shipped = {"tiny": "demo", "small": "emoji", "original": "dalle-laion"}[model]
    assert config.model == load_run(shipped).model
    assert config.optimizer.model_copy(update={"total_epochs": 0}) == load_run(shipped).optimizer.model_copy(
        update={"total_epochs": 0}
    )


@pytest.mark.parametrize("word", ["2024", "1e3", "null", "no"])
def test_words_that_yaml_takes_for_something_else(word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("my-run.yaml"), Answers(name=word, who=f"{word},bob", moderators=word))
    config = load_run("my-run.yaml")
    assert config.run_id == word and config.authority.users == (word, "bob") and config.authority.moderators == (word,)


def test_a_file_that_is_not_good_is_not_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("volunteer_kit.host.init.text_of", lambda answers, key: "run_id: 2024\n")
    with pytest.raises(RunError):
        write(Path("my-run.yaml"), Answers())
    assert not list(tmp_path.glob("*.*"))


def test_each_answer_is_checked_at_once_and_asked_again():
    answers = iter(
        ["a b", "run-1", "huge", "small", "scenes", "/data/{0..3}.tar", "-x", "org", "ada", "http://a.b", "", ""]
    )
    asked, said = [], []

    def ask(question, default):
        asked.append((question.split()[0], default))
        return next(answers)

    done = ask_all(Answers(), ask, said.append)
    assert done == Answers("run-1", "small", "/data/{0..3}.tar", "org", "ada", "", "")
    assert len(said) == 5 and "letters, digits" in said[0] and "tiny, small, original" in said[1]
    assert dict(asked)["Data"] == "" and dict(asked)["Name"] == "my-run"


@pytest.mark.parametrize(
    ("question", "answer", "model"),
    [
        ("data", "/a.tar", "tiny"),
        ("data", "scenes", "original"),
        ("data", "hub:nothing", "original"),
        ("data", "hub:a/b", "small"),
        ("help_url", "http://x", None),
        ("moderators", "a/b", None),
        ("name", "../x", None),
    ],
)
def test_answers_that_do_not_do(question, answer, model):
    with pytest.raises(HostError):
        check(question, answer, Answers(model=model))


def test_a_hub_data_set_of_codes(tmp_path):
    complete = Answers("r", "original", "hub:org/codes@main", "an-org", "", "", "")
    text = text_of(complete, KEY)
    assert yaml.safe_load(text)["data"] == {"kind": "hub", "dataset": "org/codes@main"}


def test_a_file_that_is_there_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-run.yaml").write_text("mine")
    with pytest.raises(HostError, match="is there already"):
        write(Path("my-run.yaml"), Answers(who="an-org"))
    assert (tmp_path / "my-run.yaml").read_text() == "mine" and not Path("my-run-host").exists()
