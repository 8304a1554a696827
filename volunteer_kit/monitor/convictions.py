"""What the swarm finds against a member, beside the loop: told in the journal, and reported to the run's authority."""

from __future__ import annotations

import threading
from collections.abc import Callable

from volunteer_kit.auth.authority_client import AuthorityRefused
from volunteer_kit.monitor.member import Member
from volunteer_kit.monitor.notes import Notes
from volunteer_kit.swarm.verification.convictions import ConvictionBoard, evidence_of
from volunteer_kit.swarm.verification.enforcement import Case, ConvictionKeeper

REPORT_EVERY = 5.0  # s between two attempts to reach an authority that is away
FINAL = ("set_aside", "not_monitor", "nobody", "minority", "malformed", "run", "proof")  # kinds of refusals
CONVICTED = "{username} was shut out by the swarm: {reason}"  # where there is no authority to ban it


class Convictions:
    """Two threads: one looks and honours as every peer does, the other asks the authority, which may take its time.

    :param name_of: of a peer, for people
    :param explain: told (account, reason) before the account is on the list of bans; None: it will not be, for that
    """

    def __init__(
        self,
        member: Member,
        notes: Notes,
        name_of: Callable[..., str | None],
        explain: Callable[[bytes, str | None], None],
        report_every: float = REPORT_EVERY,
    ):
        self._membership, self._notes, self._name_of, self._explain = member.membership, notes, name_of, explain
        self._every = report_every
        self._waiting: dict[bytes, Case] = {}  # account -> what is to be reported
        self._stop, self._news = threading.Event(), threading.Event()
        board = ConvictionBoard(member.peer.dht, member.run_key)
        self._keeper = ConvictionKeeper(board, member.admission, member.board.fetch, on_convicted=self._take)
        self._thread = threading.Thread(target=self._run, name="report-convictions", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._news.set()
        self._keeper.close()
        self._thread.join(timeout=2.0)

    def _take(self, case: Case) -> None:
        if self._membership is None:
            name = self._name_of(case.accused) or ""
            self._notes.event("banned", CONVICTED, username=name, reason=case.in_words())
            return
        self._explain(case.account, case.in_words())
        self._waiting[case.account] = case
        self._news.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._news.wait(None if not self._waiting else self._every)
            self._news.clear()
            for account, case in list(self._waiting.items()):
                if not self._stop.is_set() and self._report(case):
                    self._waiting.pop(account, None)

    def _report(self, case: Case) -> bool:
        """:returns: has the authority answered?"""
        evidence = evidence_of(case.accused, case.said, case.others)
        try:
            self._membership.report_conviction(evidence.to_text(), len(case.said))
        except AuthorityRefused as refused:
            if refused.kind == "already":
                return True
            if refused.kind != "set_aside":
                self._notes.warn(f"A conviction could not be reported to the authority: {refused.first_line}")
            if refused.kind in FINAL:
                self._explain(case.account, None)
            return refused.kind in FINAL
        except Exception as error:  # of a disk with the keys on it, say; it is tried again
            self._notes.warn(f"A conviction could not be reported to the authority: {error!r}")
            return False
        return True
