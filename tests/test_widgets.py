"""What a volunteer is shown: pages that escape, terms, lines and a terminal; without a kernel."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import subprocess
import sys
import time

import pytest

from tests.test_words import NOW, training
from volunteer_kit.platforms import platform_name
from volunteer_kit.widgets import page, words
from volunteer_kit.widgets.chart import loss_chart, ticks
from volunteer_kit.widgets.progress import Picture
from volunteer_kit.widgets.surface import Declined, Surface, TermsError, open_surface
from volunteer_kit.widgets.terminal import TerminalSurface, picture, sparkline
from volunteer_kit.widgets.terms import Platform, Terms, detect_platform
from volunteer_kit.widgets.text import TextSurface

EVIL = "<script>alert('x')</script>\x1b[31m\x07\u202e \"q\""
PNG = b"\x89PNG\r\n\x1a\nrest"


# HTML


def test_what_comes_from_outside_is_escaped():
    hostile = training(
        run_id=EVIL, description=EVIL, name=EVIL, detail=EVIL, help_url="javascript:alert(1)", device=EVIL, plan=EVIL,
        why=EVIL, warnings=[(NOW, EVIL)], pictures=[Picture(EVIL, PNG, 3)],
    )  # fmt: skip
    html = page.progress_page(hostile) + page.terms(Terms(EVIL, EVIL, checked_by=EVIL, help_url=f'https://x/"{EVIL}'))
    html += page.browser_login("javascript:alert(1)", EVIL) + page.lines([EVIL], "error") + page.agreed(Terms(EVIL))
    assert "<script" not in html and "javascript:" not in html and "\x1b" not in html and "\u202e" not in html
    assert html.count("&lt;script&gt;") >= 10 and '"https://x/"' not in html


def test_a_link_that_is_none_is_shown_and_breaks_nothing():
    html = page.live(training(help_url="https://[x<b>")) + page.terms(Terms("demo", help_url="https://[x"))
    assert "Help: https://[x&lt;b&gt; (no address)" in html and "href" not in html


def test_who_sees_a_token_is_said_alike_twice():
    terms = Terms("demo", checked_by="auth.example.org<")
    hint = page.token_hint("https://hub/tokens", False, terms.checked_by)
    assert "memory" in hint and "goes to the Hub and to auth.example.org&lt;, the run's authority." in hint
    assert "passed on" not in hint and "goes to the Hub." in page.token_hint("https://hub/tokens", False)
    assert "Your login goes to the Hub and to auth.example.org<" in dict(terms.points())["What leaves this machine"]


def test_pictures_that_are_no_png_or_too_large_are_left_out():
    others = {"bad": b"<svg onload=alert(1)>", "big": PNG + bytes(10**6)}
    html = page.pictures([Picture("good", PNG, 1), *(Picture(name, png, 1) for name, png in others.items())])
    assert html.count("<img") == 1 and "good" in html and "bad" not in html
    assert page.pictures([]) == ""


def test_the_curve_has_one_size_and_survives_any_numbers():
    for values in ([], [(1, 2.0)], [(1, 2.0), (2, 2.0)], [(5, 1e-9), (5, 1e9)], [(i, 1 / (i + 1)) for i in range(300)]):
        chart = loss_chart(values)
        assert f'viewBox="0 0 {760} {210}"' in chart and "nan" not in chart and "inf" not in chart
    assert "lower is better" in chart and "global step" in chart
    assert ticks(4.4, 7.1) == [4, 5, 6, 7, 8] and all(3 <= len(ticks(0, 10.0**n)) <= 6 for n in range(-5, 9))


# Platforms and terms


@pytest.mark.parametrize(
    "variables, name, says",
    [
        ({"COLAB_RELEASE_TAG"}, "colab", ["forbid distributed computing workers", "paid compute units"]),
        ({"KAGGLE_KERNEL_RUN_TYPE"}, "kaggle", ["Read its terms"]),
        ({"KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG"}, "kaggle", ["Read its terms"]),
        ({"KAGGLE_URL_BASE", "COLAB_RELEASE_TAG"}, "kaggle", ["Read its terms"]),
        ({"KAGGLE_USERNAME", "KAGGLE_KEY", "COLAB_RELEASE_TAG"}, "colab", ["paid compute units"]),
        ({"KAGGLE_USERNAME", "KAGGLE_KEY"}, "own", ["owner of this machine"]),
        ({"BINDER_SERVICE_HOST"}, "binder", ["short looks"]),
        (set(), "own", ["owner of this machine"]),
    ],
)
def test_platforms(monkeypatch, variables, name, says):
    for known in [known for known in os.environ if known.startswith(("COLAB_", "KAGGLE_", "BINDER_"))]:
        monkeypatch.delenv(known)
    for variable in variables:
        monkeypatch.setenv(variable, "1")
    assert detect_platform() == Platform(name)
    for part in says:
        assert part in Platform(name).words


def test_a_loaded_module_tells_the_platform_too():
    assert platform_name({}, {"google.colab"}) == "colab"
    assert platform_name({"COLAB_RELEASE_TAG": "1"}, {"google.colab", "kaggle_secrets"}) == "kaggle"
    assert platform_name({}, set()) == "own"


def test_terms_say_what_runs_what_leaves_and_what_it_costs():
    terms = Terms("demo", "A model.", max_hours=6, max_mbps=20, max_gb=1.5, download_bytes=5e8, step_bytes=2.5e8,
                  checked_by="auth.example.org", platform=Platform("colab"))  # fmt: skip
    text = "\n".join(f"{heading}: {body}" for heading, body in terms.points())
    for part in ("your IP address. They and the run's public page see", "GPU or CPU",
                 "Never files", "username", "auth.example.org", "full load",
                 "500 MB to download", "250 MB with each step",
                 "6 h at most, 20 Mbit/s at most, 1.5 GB at most", "compute units"):  # fmt: skip
        assert part in text
    assert "max_hours" in dict(Terms("demo").points())["Limits"]


@pytest.mark.parametrize(
    "caps, says",
    [
        ({"max_hours": 1 / 30}, "2 min at most."),
        ({"max_gb": 0.5}, "500 MB at most. Of the line, model and gradients count; reading the data"),
        ({"max_mbps": 8}, "8 Mbit/s at most. Of the line, model and gradients count; reading the data"),
    ],
)
def test_limits_say_what_they_cover(caps, says):
    limits = dict(Terms("demo", **caps).points())["Limits"]
    assert limits.startswith(says) and limits.endswith(".")


# Text and terminal


class Choice:
    """A login that knows one token."""

    organization, token_url = None, "https://hub/tokens"

    def __init__(self) -> None:
        self.notes, self.name, self.closed = ["Not used: HF_TOKEN. It has expired."], None, False

    def check(self, token: str) -> str:
        if token != "hf_good":
            raise PermissionError("The Hub does not know this token.\n1. Copy it again.")
        self.name = "anna"
        return self.name

    def browser(self):
        self.notes.append("This client is too old for the browser.")
        return None

    def from_browser(self):
        return None

    def close(self) -> None:
        self.closed = True


def test_lines_come_when_the_state_changes():
    lines: list[str] = []
    surface = TextSurface(write=lines.append)
    for progress in (training(state="starting"), training(), training(), training(warnings=[(NOW, f"lost {EVIL}")])):
        surface.show(progress)
    surface.close(training(state="left"))
    surface.close(training(state="left"))
    assert lines[0] == "Tesla T4: batches of 8, fp16. no bf16" and lines[1] == "Starting"
    assert lines[2].startswith("Training, 3rd of 41") and "Loss 4.42" in lines[2] and "12,345" in lines[2]
    assert lines[3].startswith("Warning: lost") and "\x1b" not in lines[3]
    assert len(lines) == 6 and lines[4].startswith("You have left")


def test_where_nobody_answers_terms_are_printed_and_have_to_be_accepted(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(TermsError, match=r"1\. .*volunteer-kit join demo\n2\. .*--accept-terms"):
        open_surface("text").welcome(Terms("demo"), None)
    assert "Never files" in capsys.readouterr().out
    with pytest.raises(TermsError, match=r"kit join '/my runs/a.yaml'\n2\..*join_swarm\('/my runs/a.yaml', accept"):
        open_surface("text").welcome(Terms("demo", run="/my runs/a.yaml"), None)
    open_surface("text", accept_terms=True).welcome(Terms("demo"), None)
    with pytest.raises(TermsError, match="needs a login.*\n.*expired.*\n1. .*HF_TOKEN"):
        open_surface("text", accept_terms=True).welcome(Terms("demo"), Choice())
    choice = Choice()
    choice.check("hf_good")
    open_surface("text", accept_terms=True).welcome(Terms("demo"), choice)


def test_a_typed_token_accepts_and_logs_in(monkeypatch):
    lines: list[str] = []
    typed = iter(["", "hf_bad", "hf_good"])
    monkeypatch.setattr("getpass.getpass", lambda prompt: next(typed))
    monkeypatch.setattr("volunteer_kit.widgets.text.can_answer", lambda kernel: True)
    choice = Choice()
    TextSurface(write=lines.append).welcome(Terms("demo"), choice)
    text = "\n".join(lines)
    assert choice.name == "anna" and choice.closed and lines[-1] == "Logged in as anna."
    assert "too old for the browser" in text
    assert "It has expired" in text and "Nothing was typed" in text and "Copy it again" in text and "hf_" not in text
    assert "no box ticked" in text and "https://hub/tokens" in text and "can read your private" in text


@pytest.mark.parametrize("error", [KeyboardInterrupt, EOFError])
def test_ctrl_c_declines(monkeypatch, error):
    def refuse(prompt=""):
        raise error

    monkeypatch.setattr("builtins.input", refuse)
    monkeypatch.setattr("volunteer_kit.widgets.text.can_answer", lambda kernel: True)
    with pytest.raises(Declined, match="no training has begun"):
        TextSurface(write=lambda line: None).welcome(Terms("demo"), None)


@pytest.mark.parametrize(
    "answer, starts", [("", True), ("y", True), (" Yes ", True), ("n", False), ("no", False), ("quit", False)]
)
def test_only_a_yes_is_a_yes(monkeypatch, answer, starts):
    monkeypatch.setattr("builtins.input", lambda prompt: answer)
    monkeypatch.setattr("volunteer_kit.widgets.text.can_answer", lambda kernel: True)
    with contextlib.nullcontext() if starts else pytest.raises(Declined, match="no training has begun"):
        TextSurface(write=lambda line: None).welcome(Terms("demo"), None)


def on_terminal(out: io.StringIO):
    from rich.console import Console

    return Console(file=out, width=100, force_terminal=True, highlight=False, markup=False, no_color=True)


FAILURE = "The worker crashed.\n  1. Read the log:\n  2. Make room\x1b[31m.\n\n" + 300 * "  | <b>tail</b>\n"


def test_the_ways_out_of_a_failure_stay_in_their_lines():
    told = words.meaning(training(state="failed", message=FAILURE))
    assert told.startswith("The worker crashed.\n  1. Read the log:\n  2. Make room[31m.\n  | <b>tail")
    assert 1900 < len(told) <= words.LONGEST_MESSAGE
    failed = training(state="failed", message=FAILURE)
    html = page.progress_page(failed)
    assert "crashed.\n  1. Read the log:\n  2. Make room[31m.\n  | &lt;b&gt;" in html and "\x1b" not in html
    assert ".vk-meaning" in page.STYLE.split("white-space: pre-line")[0]
    lines: list[str] = []
    TextSurface(write=lines.append).close(failed)
    assert lines[:3] == ["Stopped. The worker crashed.", "  1. Read the log:", "  2. Make room[31m."]
    TextSurface(write=lines.append).say("one\n\n1. two")
    assert lines[-2:] == ["one", "1. two"]
    out = io.StringIO()
    on_terminal(out).print(picture(failed))
    assert "    1. Read the log:" in out.getvalue().splitlines()[2]


def test_the_terminal_shows_the_same_words_and_no_markup():
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, highlight=False, markup=False)
    console.print(picture(training(name="[red]x[/red]", warnings=[(NOW, EVIL)]), keys=True))
    text = out.getvalue()
    for part in (words.headline(training()), "12,345", "3,021 of 4,096", "[red]x[/red]", "[p]ause", "Tesla T4"):
        assert part in text
    assert "\x1b[31m" not in text and "\x07" not in text
    console.print(picture(training(is_elsewhere=True), keys=True))
    assert "[q]uit looking" in out.getvalue()
    surface = TerminalSurface(console=console)
    assert isinstance(surface, Surface)
    surface.show(training())
    surface.close(training(state="left"))
    assert "You have left" in out.getvalue()


def test_the_sparkline_is_a_mean_of_its_parts():
    assert sparkline([]) == sparkline([1.0]) == ""
    assert sparkline([8.0, 4.0, 2.0, 1.0]) == "█▄▂▁" and len(sparkline([1.0] * 999)) == 40


KEYS = """
from volunteer_kit.widgets.terminal import TerminalSurface
from volunteer_kit.widgets.progress import Progress
surface, wishes = TerminalSurface(), []
surface.pump(0)
print("ready", flush=True)
while "leave" not in wishes:
    surface.show(Progress(state="training"))
    wishes += surface.pump(0.1)
surface.close(Progress(state="left"))
print(wishes, flush=True)
"""


@pytest.fixture
def own_terminal(monkeypatch):
    """(keyboard, descriptor): stdin is a terminal."""
    ours, theirs = pty.openpty()
    with open(ours, "wb", buffering=0) as keyboard, open(theirs, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield keyboard, theirs


def press(keyboard, terminal: int, key: bytes) -> None:
    """And wait until the system has brought it to the other end, where no key waits for Enter."""
    keyboard.write(key)
    assert select.select([terminal], [], [], 60.0)[0]


def waits_for_enter(terminal: int) -> bool:
    import termios

    return bool(termios.tcgetattr(terminal)[3] & termios.ICANON)


def test_a_process_in_the_background_does_not_touch_the_terminal(own_terminal, monkeypatch):
    """`join ... &`, or `bg` after Ctrl-Z: the system would stop it."""
    keyboard, theirs = own_terminal
    foreground = os.getpgrp()
    monkeypatch.setattr(os, "tcgetpgrp", lambda descriptor: foreground)
    surface = TerminalSurface()
    foreground += 1
    assert surface.pump(0.0) == [] and waits_for_enter(theirs)
    foreground -= 1
    assert surface.pump(0.0) == [] and not waits_for_enter(theirs)
    press(keyboard, theirs, b"q")
    assert surface.pump(0.0) == ["leave"]
    foreground += 1
    press(keyboard, theirs, b"q")
    assert surface.pump(0.0) == []
    surface.close()
    assert not waits_for_enter(theirs), "it is another program's now"


def test_keys_work_again_after_ctrl_z(own_terminal):
    import termios

    keyboard, theirs = own_terminal
    before = termios.tcgetattr(theirs)
    surface = TerminalSurface()
    assert surface.pump(0.0) == [] and not waits_for_enter(theirs)
    termios.tcsetattr(theirs, termios.TCSANOW, before)  # the shell, while the process was stopped
    assert surface.pump(0.0) == [] and not waits_for_enter(theirs)
    press(keyboard, theirs, b"p")
    assert surface.pump(0.0) == ["pause"]
    surface.close()
    assert waits_for_enter(theirs)


def test_a_terminal_that_is_gone_has_no_keys(own_terminal):
    keyboard, _ = own_terminal
    surface = TerminalSurface()
    assert surface.pump(0.0) == []
    keyboard.close()
    assert surface.pump(0.0) == []
    surface.close()


def test_keys_in_a_real_terminal_and_the_terminal_is_put_back():
    import termios

    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen([sys.executable, "-c", KEYS], stdin=theirs, stdout=theirs, stderr=theirs)
    try:
        seen = b""
        while b"ready" not in seen:
            seen += os.read(ours, 4096)
        os.write(ours, b"pxrq")
        until = time.monotonic() + 120
        while b"'leave']" not in seen and time.monotonic() < until:
            seen += os.read(ours, 4096)
        assert b"['pause', 'resume', 'leave']" in seen and process.wait(120) == 0
        assert termios.tcgetattr(theirs)[3] == before[3]
    finally:
        process.kill()
        os.close(ours)
        os.close(theirs)


def test_nothing_heavy_is_imported_before_it_is_needed():
    code = (
        "import sys, volunteer_kit.widgets.surface, volunteer_kit.widgets.notebook, volunteer_kit.widgets.html, "
        "volunteer_kit.widgets.terminal, volunteer_kit.widgets.welcome, volunteer_kit.auth.login\n"
        "print([m for m in ('ipywidgets', 'IPython', 'rich', 'huggingface_hub', 'torch', 'zmq') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    without = "import sys; sys.modules['rich'] = sys.modules['ipywidgets'] = sys.modules['IPython'] = None\n"
    code = without + "from volunteer_kit.widgets.surface import best_kind; print(best_kind())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "text"
    with pytest.raises(ValueError, match="no surface"):
        open_surface("hologram")
