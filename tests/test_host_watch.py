"""One process of a host: when it is started again, and what of it is told."""

from __future__ import annotations

import contextlib
import json
import queue

import psutil
import pytest

from tests.test_host import until
from volunteer_kit.host.folder import HostFolder
from volunteer_kit.host.watch import News, Part, Patience, Watch


@pytest.mark.parametrize(
    ("crashes", "pauses"),
    [
        ([0, 1, 2], [1, 2, 4]),
        ([0, 1, 2, 3, 4, 5, 70, 200, 450, 800], [1, 2, 4, 8, 16, 60, 120, 240, 300, 300]),  # without end
        ([0, 400, 800, 1200, 1600, 2000, 2400], [1] * 7),  # rarely
    ],
)
def test_pauses_grow_and_there_is_no_end(crashes, pauses):
    patience = Patience()
    assert [patience.crashed(now) for now in crashes] == pauses


def test_what_was_mended_is_started_again_at_once():
    patience = Patience(most=1)
    assert patience.crashed(0) == 60 and patience.crashed(100, lasted=20) == 120
    assert patience.is_worn
    patience.most = 6
    assert patience.crashed(1000, lasted=700) == 1 and not patience.is_worn


@pytest.fixture
def watch(tmp_path):
    """Makes a Watch of a script; news arrive in `.news`."""
    made = []

    def make(script: str, **settings) -> Watch:
        module = tmp_path / f"part{len(made)}.py"
        module.write_text(script)
        news: queue.SimpleQueue[News] = queue.SimpleQueue()
        part = Part("part", (module.stem,), **settings)
        found = Watch(part, tmp_path / "logs" / "part.log", f"MARK={tmp_path}", news.put, Patience(most=2, first=0.05))
        found.news = news
        made.append(found)
        found.start()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        yield make
    for one in made:
        one.begin_stop()
        one.kill()
        one.join(10)


def test_the_log_is_bounded(watch, tmp_path):
    watch("for _ in range(12): print('x' * 1_000_000)\nprint('the end')\nimport time; time.sleep(100)\n")
    log = tmp_path / "logs" / "part.log"

    def is_all_there() -> bool:
        with contextlib.suppress(FileNotFoundError):  # it is turned over just now
            return log.read_bytes().endswith(b"the end\n")
        return False

    until(is_all_there, "no end of the log")
    sizes = [path.stat().st_size for path in log.parent.iterdir()]
    assert len(sizes) == 2 and max(sizes) <= 5_000_000


def test_who_is_not_up_in_time_is_started_again(watch):
    one = watch("import time\ntime.sleep(100)\n", ready_within=0.3)
    assert "was not up after 0 s" in one.news.get(timeout=60).text
    assert one.news.get(timeout=60).kind == "failing"


def test_a_parts_warning_is_told_and_logged(watch, tmp_path):
    """Such as a list of checkpoints that was damaged: nobody reads a log while all goes well."""
    one = watch("import time\nprint('{\"warning\": \"a list was damaged\"}', flush=True)\ntime.sleep(100)\n")
    assert one.news.get(timeout=60) == News("warning", "part", "a list was damaged")
    log = tmp_path / "logs" / "part.log"
    until(lambda: log.exists() and "a list was damaged" in log.read_text(), "not in the log")


def test_a_parts_good_news_are_told(watch):
    """Such as the link that opens the notebook in Colab, once the Hub has it."""
    one = watch("import time\nprint('{\"said\": \"it opens in Colab\"}', flush=True)\ntime.sleep(100)\n")
    assert one.news.get(timeout=60) == News("said", "part", "it opens in Colab")


def test_a_part_that_says_that_it_is_over_is_told_and_not_started_again(watch):
    """Such as a first peer whose key another machine has: a new start would change nothing."""
    one = watch("print('{\"over\": \"another one is here\"}', flush=True)\nraise SystemExit(2)\n")
    assert one.news.get(timeout=60) == News("over", "part", "another one is here")
    assert one.join(60) and one.starts == 1 and one.news.empty()


def test_the_parts_own_reason_is_told(watch):
    one = watch('print(\'{"error": "The port is taken.\\\\n1. Another"}\')\nraise SystemExit(2)\n')
    assert "says: The port is taken" in one.news.get(timeout=60).text


def test_stdin_is_the_leash_and_not_the_parts(watch):
    one = watch('import sys\nprint(\'{"ready": {"read": %d}}\' % len(sys.stdin.read()), flush=True)\ninput()\n')
    assert one.news.get(timeout=60).kind == "ready" and one.ready == {"read": 0}


def test_all_of_a_part_ends_with_it(watch):
    script = (
        "import json, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(json.dumps({'ready': {'pid': child.pid}}), flush=True)\n"
        "import signal; signal.pause()\n"
    )
    one = watch(script)
    assert one.news.get(timeout=60).kind == "ready"
    grandchild = psutil.Process(one.ready["pid"])
    one.kill()
    assert one.news.get(timeout=60).kind == "restarting"
    assert not psutil.wait_procs([grandchild], timeout=60)[1]


def test_host_json_that_cannot_be_read_is_not_guessed(tmp_path):
    from volunteer_kit.host import HostError

    folder = HostFolder(tmp_path)
    assert folder.read() == {}
    for text in ("{", "[]"):
        (tmp_path / "host.json").write_text(text)
        with pytest.raises(HostError, match="backup"):
            folder.read()
    folder.save({"run_id": "a"})
    assert json.loads((tmp_path / "host.json").read_text()) == {"run_id": "a"}


def test_a_part_that_lacks_a_package_is_told_once_and_starts_again_when_it_was_installed(watch, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{tmp_path}")
    monkeypatch.setattr("volunteer_kit.host.watch.LOOK_FOR_PACKAGES", 0.1)
    (tmp_path / "site").mkdir()
    one = watch(
        "import sys, time\nsys.modules['fastapi'] = None\n"
        "try: import stand_in\nexcept ModuleNotFoundError: import fastapi\n"
        "print('{\"ready\": {}}', flush=True)\ntime.sleep(100)\n"
    )
    news = one.news.get(timeout=60)
    assert news.kind == "failing" and "The package 'fastapi' is not installed." in news.text
    assert "volunteer-kit setup host" in news.text and "Traceback" not in news.text
    with pytest.raises(queue.Empty):
        one.news.get(timeout=1)  # ten looks
    assert one.starts == 1
    (tmp_path / "site" / "stand_in.py").touch()
    assert one.news.get(timeout=60) == News("ready", "part") and one.starts == 2
