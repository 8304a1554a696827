"""The table of all attacks, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.hostile_parts import dht_attacks, faults, http_attacks, link_attacks, node_attacks, stream_attacks
from benchmarks.hostile_parts.attack import Attack, Case

# the faults come last: they are of the machine's own, and nothing is held against a swarm that they have hit
ATTACKS: list[Attack] = [
    *link_attacks.ATTACKS,
    *dht_attacks.ATTACKS,
    *node_attacks.ATTACKS,
    *stream_attacks.ATTACKS,
    *http_attacks.ATTACKS,
    *faults.ATTACKS,
]


def by_name(name: str) -> Attack:
    return next(attack for attack in ATTACKS if attack.name == name)


def rows(run: str, only: list[str] | None = None, quick: bool = False) -> Iterator[tuple[Attack, Case]]:
    """Of one run.

    :param only: names of attacks, or beginnings of names
    :param quick: a few of each kind
    """
    for attack in ATTACKS:
        if only and not any(attack.name.startswith(name) for name in only):
            continue
        if quick and not only and not attack.is_quick:
            continue
        for case in attack.cases:
            if case.run == run:
                yield attack, case
