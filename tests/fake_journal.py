"""Journals as a monitor would have written them, for looking at the dashboard:

    python -m tests.fake_journal FOLDER [STAGE]     # one of STAGES; default: all, each in a folder of its own

The loss curve and the numbers are made up; everything goes through Journal, as the real ones do.
"""

from __future__ import annotations

import math
import random
import sys
import time
from pathlib import Path

from PIL import Image, ImageDraw

from volunteer_kit.journal import Journal

NOW = 1_790_000_000.0

STAGES = ("waiting", "one", "many", "crowd", "silent", "young")
DEVICES = ("Tesla T4", "Tesla T4", "Tesla P100-PCIE-16GB", "NVIDIA GeForce RTX 3060", "TPU v5e", "CPU, 4 threads",
           "NVIDIA GeForce RTX 4090", "Apple M2")  # fmt: skip
CAPTIONS = (
    "a large red circle on the left of a grey background",
    "a small blue square in the centre of a white background",
    "a large green triangle at the top of a black background",
    "a small yellow circle at the bottom of a blue background",
)
FIRST = ("ada", "grace", "linus", "margaret", "katherine", "barbara", "edsger", "donald", "frances", "radia")


def fill(folder: Path, stage: str, now: float | None = None) -> Path:
    """Write folder/journal.sqlite and pictures; returns the folder."""
    now = time.time() if now is None else now
    folder.mkdir(parents=True, exist_ok=True)
    with Journal(folder / "journal.sqlite") as journal:
        if stage == "waiting":
            return folder
        volunteers = {"one": 1, "young": 3, "many": 41, "silent": 41, "crowd": 2000}[stage]
        hours = {"one": 0.6, "young": 0.02, "many": 300, "silent": 300, "crowd": 30}[stage]
        end = now - (320 if stage == "silent" else 2)
        _metrics(journal, end, hours, volunteers)
        _people(journal, volunteers, hours)
        _events(journal, end, volunteers, hours)
        if volunteers > 1:
            failed = {"no_group": 122, "peer_lost": 61, "timeout": 9} if volunteers > 40 else {}
            journal.add_rounds(int(700 * hours), int(700 * hours) - sum(failed.values()), failed)
        if stage != "young":
            _pictures(journal, folder / "pictures", end)
    return folder


def _metrics(journal: Journal, end: float, hours: float, volunteers: int) -> None:
    dice, seconds = random.Random(0), 3600 * hours
    steps = min(3000, max(3, int(seconds / 5)))
    times = sorted({end - seconds * (i / steps) ** 2 for i in range(steps + 1)})
    with journal._writing() as db:  # one transaction; each add_metrics is one of its own
        for t in times:
            done = 1 - (end - t) / seconds
            if 0.62 < done < 0.64 and hours > 100:
                continue  # the monitor was down
            spike = 2.5 * math.exp(-((done - 0.8) ** 2) / 2e-5) if hours > 100 else 0
            loss = 4.4 + 2.8 * math.exp(-5 * done) + 0.03 * dice.gauss(0, 1) + spike
            here = max(1, round(volunteers * (0.35 + 0.6 * done) * (1 + 0.2 * math.sin(t / 13750)) + dice.gauss(0, 1)))
            here = min(here, volunteers)
            epoch = int(7617 * done) if hours > 1 else int(180 * done)
            row = (t, epoch, loss if epoch else None, here * 0.71 * (1 + 0.02 * dice.gauss(0, 1)), here, dice.random(),
                   epoch * 256)  # fmt: skip
            db.execute("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?, ?, ?, ?)", row)


def name_of(number: int) -> str:
    return FIRST[number] if number < len(FIRST) else f"{FIRST[number % 10]}-{number // 10}"


def _people(journal: Journal, volunteers: int, hours: float) -> None:
    dice = random.Random(1)
    members, accounts = [], []
    for number in range(volunteers):
        share = 1 / (number + 1.5) + 0.01
        members.append({
            "username": name_of(number), "peer_id": f"Qm{number:044d}", "device": DEVICES[number % len(DEVICES)],
            "here": dice.random() < 0.7 or number == 0, "samples_per_second": 3 * share,
        })  # fmt: skip
        accounts.append({
            "username": name_of(number), "samples": int(4e5 * share * hours / 30),
            "provisional": 256 * (number % 7 == 0),
            "seconds": 3600 * hours * min(1, 3 * share), "machines": 1 + number % 3,
        })  # fmt: skip
    journal.set_members(members)
    journal.set_leaderboard(accounts)


def _events(journal: Journal, end: float, volunteers: int, hours: float) -> None:
    begin = end - 3600 * hours
    journal.add_event(begin, "joined", username="ada", device="Tesla T4")
    if volunteers < 40:
        return
    for number in range(12):
        journal.add_event(begin + 60 * number, "joined", username=name_of(number))
    journal.add_event(end - 0.21 * 3600 * hours, "outlier", username="mallory", reason="its gradients are 40 times "
                      "longer than the others'")  # fmt: skip
    journal.add_event(end - 0.205 * 3600 * hours, "banned", username="mallory", by="grace", reason="sends noise")
    journal.add_event(end - 0.2 * 3600 * hours, "rollback", to_epoch=6090, reason="the loss rose by 2.5 within 3 steps")
    for number in range(20):
        when = end - 3600 * 7 + number * 1200
        journal.add_event(when, "checkpoint", epoch=7400 + 10 * number)
        journal.add_event(when + 400, "joined" if number % 3 else "left", username=name_of(13 + number))
    journal.add_event(end - 260, "refused", username="trudy", reason="its access token is of another run")
    journal.add_event(end - 130, "joined", username="radia-3", device="NVIDIA GeForce RTX 4090")


def _pictures(journal: Journal, folder: Path, end: float) -> None:
    folder.mkdir(exist_ok=True)
    shapes = (("red", "grey", (10, 28, 66, 100)), ("blue", "white", (50, 50, 78, 78)),
              ("green", "black", (30, 8, 96, 70)), ("yellow", "blue", (50, 92, 78, 120)))  # fmt: skip
    for epoch in (7300, 7450, 7600):
        for number, (caption, (colour, ground, box)) in enumerate(zip(CAPTIONS, shapes, strict=True)):
            image = Image.new("RGB", (128, 128), ground)
            (ImageDraw.Draw(image).ellipse if number != 1 else ImageDraw.Draw(image).rectangle)(box, fill=colour)
            path = folder / f"epoch-{epoch:07d}-{number}.png"
            image.save(path)
            journal.add_picture(end - (7617 - epoch) * 140, epoch, caption, path)


def hostile_journal(folder: Path) -> Path:
    """Two of its names are hidden, and strangers wrote markup wherever they may write."""
    with Journal(folder / "journal.sqlite") as journal:
        journal.add_metrics(time.time(), 5, 4.0, 10.0, 3, 0.5, 1280)
        journal.add_event(NOW, "joined", username="secretperson", device="T4")
        journal.add_event(NOW, "banned", username="mallory", reason="copied SecretPerson's <script>alert(1)</script>")
        journal.add_event(NOW, "warning", "seen near secretperson", by="secretperson")
        journal.set_members([{"username": "secretperson", "peer_id": "Qmsecret", "device": "<b>T4</b>", "here": True}])
        journal.set_leaderboard([
            {"username": "SecretPerson", "samples": 900, "seconds": 7200, "machines": 2},
            {"username": "quietone", "samples": 100, "seconds": 3600, "machines": 1},
            {"username": "<img src=x onerror=alert(1)>", "samples": 10},
        ])  # fmt: skip
        picture = folder / "pictures" / "a.png"
        picture.parent.mkdir()
        picture.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
        journal.add_picture(NOW, 5, 'by secretperson "><script>alert(2)</script></script>', picture)
        journal.hide("secretperson", True)
        journal.hide("quietone", True)
    return folder


if __name__ == "__main__":
    for each in sys.argv[2:] or STAGES:
        print(fill(Path(sys.argv[1]) / each, each))
