"""A journal becomes ONE dict; page, JSON and Prometheus are three views of it. Nothing else reads the journal.

Everything in it may be seen by anybody: no peer id, no address, no hidden name.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from volunteer_kit.dashboard.happenings import SOMEBODY, Names, told
from volunteer_kit.journal import JournalReader
from volunteer_kit.journal.bounds import account_key
from volunteer_kit.runs import RunConfig
from volunteer_kit.swarm.records.failures import CAUSES
from volunteer_kit.ways_in import Offer, ways_in
from volunteer_kit.widgets.words import plain

State = dict[str, Any]
POINTS = 500  # of the history
LEADERS = 100
IMAGES = 24
EVENTS = 60
RARE = ("banned", "unbanned", "rollback", "outlier", "warning")  # of these 20 more, however many joined since
DEVICES = 6  # kinds, the rest in one line
SILENT_AFTER = 120.0  # s; a monitor reports several times a minute
_DIGEST = re.compile(r"[0-9a-f]{12}")  # stands for an account whose name the ledger does not know
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def run_info(config: RunConfig) -> State:
    """What the run file says that a visitor should know."""
    return {
        "run_id": config.run_id,
        "description": plain(config.description, 600),
        "help_url": config.help_url,
        "total_epochs": config.optimizer.total_epochs,
        "target_batch_size": config.target_batch_size,
        "names_are_hub_accounts": config.authority is not None,
        "draws": config.draws,
        **way_in(Offer(config.authority.url.rstrip("/"), config.draws) if config.authority else None),
    }


def way_in(offer: Offer | None) -> State:
    """How to take part, and where the model is: of a host's offer, or of none."""
    if offer is None:
        return {"page": "", "ways": [], "model": ""}
    model = f"{offer.hub}/{offer.repo}" if offer.repo else ""
    return {"page": f"{offer.url}/", "ways": [way._asdict() for way in ways_in(offer)], "model": model}


def empty_state(run: Mapping[str, Any]) -> State:
    """Before the monitor has written anything."""
    now = dict.fromkeys(("time", "epoch", "loss", "samples_per_second", "volunteers", "progress", "samples_total"))
    return {
        "run": {**run, "status": "waiting", "began": None},
        "now": now, "devices": [], "history": [], "accounts": 0, "samples": 0,
        "leaderboard": [], "images": [], "events": [], "counts": {}, "rounds": _rounds({}),
    }  # fmt: skip


def build_state(journal: JournalReader, run: Mapping[str, Any], time: float) -> State:
    """The dict as of `time` (s since the Unix epoch). Raises JournalError."""
    with journal.snapshot():
        names = Names(journal.hidden())
        members, accounts, latest = journal.members(), journal.leaderboard(), journal.latest()
        state = empty_state(run)
        if latest:
            state["now"] = latest
        state["run"].update(status=status_of(run, latest, time), began=journal.began())
        state["history"] = [_point(row) for row in journal.metrics(POINTS)]
        state["devices"] = _devices(members)
        state["accounts"] = len(accounts)
        state["samples"] = sum(account["samples"] for account in accounts)
        state["leaderboard"] = _leaders(accounts, members, state["samples"], names)
        state["images"] = [_image(row, names) for row in journal.pictures(IMAGES)]
        state["events"] = told(_events(journal), names)[:EVENTS]
        state["counts"] = journal.counts()
        state["rounds"] = _rounds(journal.rounds())
    return state


def status_of(run: Mapping[str, Any], latest: Mapping[str, Any] | None, time: float) -> str:
    """waiting: nothing reported yet; finished; silent: the monitor has stopped reporting; else running."""
    if not latest:
        return "waiting"
    if run["total_epochs"] and latest["epoch"] >= run["total_epochs"]:
        return "finished"
    return "silent" if time - latest["time"] > SILENT_AFTER else "running"


def _point(row: Mapping[str, Any]) -> State:
    return {name: row[name] for name in ("time", "epoch", "loss", "samples_per_second", "volunteers")}


def _devices(members: list[Mapping[str, Any]]) -> list[State]:
    """Of those here: device, how many, samples/s together; the most frequent first."""
    number: Counter[str] = Counter()
    speed: defaultdict[str, float] = defaultdict(float)
    for member in members:
        if member["here"]:
            device = plain(member["device"], 80) or "unknown"
            number[device] += 1
            speed[device] += member["samples_per_second"]
    frequent = [name for name, _ in number.most_common(DEVICES)]
    for name in [name for name in number if name not in frequent]:
        number["others"] += number.pop(name)
        speed["others"] += speed.pop(name)
    return [
        {"device": d, "number": number[d], "samples_per_second": speed[d]} for d in [*frequent, "others"] if d in number
    ]


def _rounds(counts: Mapping[str, int]) -> State:
    """As members count them: a round of ten counts ten times. Every cause has its number, also 0."""
    total, complete = counts.get("rounds", 0), counts.get("complete_groups", 0)
    return {
        "total": total,
        "complete_groups": complete,
        "complete_share": complete / total if total else None,
        "failed": {cause: counts.get(cause, 0) for cause in CAUSES},
    }


def _leaders(accounts: list, members: list, total: int, names: Names) -> list[State]:
    here = {account_key(member["username"]) for member in members if member["here"]}
    leaders = []
    for rank, account in enumerate(accounts[:LEADERS], 1):
        hidden = names.is_hidden(account["username"])
        leaders.append({
            "rank": rank,
            "name": SOMEBODY if hidden else plain(account["username"], 96),
            "hidden": hidden,
            "samples": account["samples"],
            "share": account["samples"] / total if total else 0.0,
            "hours": account["seconds"] / 3600,
            "machines": account["machines"],
            "here": account["account"] in here,
            "provisional": account["provisional"],
        })  # fmt: skip
    return leaders


def _image(row: Mapping[str, Any], names: Names) -> State:
    """The address holds the time: an id of a journal that was begun anew is another picture."""
    url = f"pictures/{row['id']}-{int(row['time'])}.png"
    return {"epoch": row["epoch"], "time": row["time"], "caption": plain(names.kept_out(row["caption"])), "url": url}


def _events(journal: JournalReader) -> list[Mapping[str, Any]]:
    found = {event["id"]: event for event in journal.events(4 * EVENTS)}
    found |= {event["id"]: event for event in journal.events(20, RARE)}
    return [found[number] for number in sorted(found, reverse=True)]


def profile_of(state: Mapping[str, Any], leader: Mapping[str, Any]) -> str:
    """The address of an account's page on the Hub; empty where names are not the Hub's, or hidden."""
    name = leader["name"]
    is_hub = state["run"]["names_are_hub_accounts"] and not leader["hidden"] and not _DIGEST.fullmatch(name)
    return f"https://huggingface.co/{name}" if is_hub and _HUB_NAME.fullmatch(name) else ""
