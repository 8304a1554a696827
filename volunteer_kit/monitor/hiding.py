"""Whose names are not for the public page: as the accounts' own peers say it in their records."""

from __future__ import annotations

from collections.abc import Mapping

from hivemind.p2p import PeerID

from volunteer_kit.journal.bounds import account_key
from volunteer_kit.monitor.notes import Notes
from volunteer_kit.swarm.net.access.control import Admission
from volunteer_kit.swarm.records.peer_record import PeerRecord


def follow_wishes(records: Mapping[PeerID, PeerRecord], admission: Admission, notes: Notes) -> None:
    """One peer that hides is enough, and all that are here have to say otherwise to show the name again; who has left
    stays as he was. In an open run names are nobody's, so that none of them could be hidden by its owner."""
    if admission.is_open:
        return
    wishes: dict[str, bool] = {}
    for peer, record in records.items():
        name = admission.username_of(peer)
        if name and admission.account_of(peer) is not None:
            wishes[account_key(name)] = wishes.get(account_key(name), False) or record.hidden
    hidden = notes.do("hidden", default=None)
    for name, wish in wishes.items():
        if hidden is not None and wish != (name in hidden):
            notes.do("hide", name, wish)
