"""The dict as Prometheus's text: names and units as its guide wants them (base units, _total for what only grows)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "volunteer_kit_"
HIDDEN = "(hidden)"  # one series for all who hide their names; a Hub account has no brackets
NOW = {
    "loss": ("loss", "Training loss of the swarm"),
    "epoch": ("epoch", "Global step: epochs applied by the whole swarm"),
    "samples_per_second": ("samples_per_second", "Speed of all volunteers together"),
    "volunteers": ("volunteers", "Volunteers training now"),
    "progress": ("epoch_progress_ratio", "Of the next epoch's samples, 0 to 1"),
    "time": ("last_report_timestamp_seconds", "When the monitor reported last, since the Unix epoch"),
}


class StateCollector(Collector):
    """Asks for the dict at each scrape."""

    def __init__(self, state: Callable[[], Mapping[str, Any]]):
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        yield from _swarm(state)
        yield from _accounts(state["leaderboard"])
        yield from _rounds(state["rounds"])
        events = CounterMetricFamily(f"{PREFIX}events", "What happened, by kind", labels=["kind"])
        for kind, number in sorted(state["counts"].items()):
            events.add_metric([kind], number)
        yield events

    def describe(self) -> Iterator[Metric]:
        return iter(())  # not known before there is a state


def exposition(state: Callable[[], Mapping[str, Any]]) -> bytes:
    """The text of one scrape."""
    registry = CollectorRegistry()
    registry.register(StateCollector(state))
    return generate_latest(registry)


def _swarm(state: Mapping[str, Any]) -> Iterator[Metric]:
    run = GaugeMetricFamily(f"{PREFIX}run_info", "The run", labels=["run_id", "status"])
    run.add_metric([state["run"]["run_id"], state["run"]["status"]], 1)
    yield run
    is_up = state["run"]["status"] in ("running", "finished")
    yield GaugeMetricFamily(f"{PREFIX}monitor_up", "Whether the monitor reports", value=float(is_up))
    for key, (name, text) in NOW.items():
        if state["now"][key] is not None:
            yield GaugeMetricFamily(PREFIX + name, text, value=state["now"][key])
    if state["now"]["samples_total"] is not None:
        total = state["now"]["samples_total"]
        yield CounterMetricFamily(f"{PREFIX}samples", "Samples that entered applied epochs", value=total)
    yield GaugeMetricFamily(f"{PREFIX}accounts", "Accounts with credit or waiting for it", value=state["accounts"])


def _rounds(rounds: Mapping[str, Any]) -> Iterator[Metric]:
    yield CounterMetricFamily(f"{PREFIX}rounds", "Rounds of averaging, counted by each member", value=rounds["total"])
    complete, text = rounds["complete_groups"], "Rounds in which all met who were expected"
    yield CounterMetricFamily(f"{PREFIX}rounds_complete_groups", text, value=complete)
    failed = CounterMetricFamily(f"{PREFIX}rounds_failed", "Rounds that failed, by cause", labels=["cause"])
    for cause, number in rounds["failed"].items():
        failed.add_metric([cause], number)
    yield failed


def _accounts(leaders: list[Mapping[str, Any]]) -> Iterator[Metric]:
    """Of the leaderboard's first: few enough for labels."""
    families = {
        "samples": CounterMetricFamily(f"{PREFIX}account_samples", "Credited samples", labels=["name"]),
        "hours": CounterMetricFamily(f"{PREFIX}account_seconds", "Time of work, all machines", labels=["name"]),
        "provisional": GaugeMetricFamily(f"{PREFIX}account_provisional_samples", "Waiting", labels=["name"]),
    }  # fmt: skip
    for field, family in families.items():
        sums: dict[str, float] = {}
        for leader in leaders:
            name = HIDDEN if leader["hidden"] else leader["name"]
            sums[name] = sums.get(name, 0) + leader[field] * (3600 if field == "hours" else 1)
        for name, value in sums.items():
            family.add_metric([name], value)
        yield family
