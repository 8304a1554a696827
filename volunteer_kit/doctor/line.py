"""Is this machine online? Told by all that were asked together: one that is away is no sign of a dead line."""

from __future__ import annotations

from volunteer_kit.doctor.finding import Finding

NAME = "line"


class Line:
    """Collects who has answered and who has not, in any thread."""

    def __init__(self) -> None:
        self._answered: dict[str, bool] = {}

    def note(self, who: str, answered: bool) -> None:
        """:param who: a name for a person; of another machine"""
        self._answered[who] = answered or self._answered.get(who, False)

    def finding(self, situation: str) -> Finding:
        """:param situation: what kind of line or machine this is; "" without a network"""
        asked = dict(self._answered)
        return verdict(situation, [who for who in asked if asked[who]], [who for who in asked if not asked[who]])


def verdict(situation: str, answered: list[str], silent: list[str]) -> Finding:
    """:param situation: what kind of line or machine this is; "" without a network"""
    if not situation:
        way_out = "ip address; ip route   show it (in a notebook: switch its internet on)"
        return Finding(NAME, "warning", "this machine has no network: no address but its own", way_out)
    if answered:
        text = f"{situation}; online: {_listed(answered)} {'answer' if len(answered) > 1 else 'answers'}"
        if silent:
            text += f", so it is not the line's fault that {_listed(silent)} {'do' if len(silent) > 1 else 'does'} not"
        return Finding(NAME, "ok", text)
    if silent:
        text = f"{situation}; perhaps offline: nobody who was asked answers ({_listed(silent)})"
        return Finding(NAME, "warning", text, "ip route; getent hosts huggingface.co   show whether a way leads out")
    return Finding(NAME, "ok", f"{situation}; nobody else's machine was asked directly")


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
