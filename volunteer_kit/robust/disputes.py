"""Two members say what cannot both be true, and nobody else can tell which of them is wrong.

A reducer says that a sender's part never came, the sender that it was sent; a member says that it was answered
otherwise than the reducer says. Both lose standing, as in Gorbunov et al. 2021, Alg. 4 (ELIMINATE): an attacker can put
one honest member on probation, and goes itself. Nobody is struck for it, for lines break.
"""

from __future__ import annotations

from collections.abc import Collection


def at_fault(claims: Collection[tuple[int, int]], members: int, reducers: int) -> list[frozenset[int]]:
    """Who loses standing: each alone, or with whom it cannot agree.

    Who is at odds with more than half of those with whom it could be is wrong by itself, since more than half are
    honest. Of the others everybody is in one pair at most: one attacker must not take many with it.

    :param claims: (member, reducer) that are at odds, by place
    :param members: how many could be at odds with a reducer; :param reducers: with a member
    """
    claims = {claim for claim in claims if claim[0] != claim[1]}
    alone = {m for m, _ in claims if 2 * sum(member == m for member, _ in claims) > reducers}
    alone |= {r for _, r in claims if 2 * sum(reducer == r for _, reducer in claims) > members}
    found, seen = [frozenset({one}) for one in sorted(alone)], set(alone)
    for member, reducer in sorted(claims):
        if not seen & {member, reducer}:
            found.append(frozenset({member, reducer}))
            seen |= {member, reducer}
    return found
