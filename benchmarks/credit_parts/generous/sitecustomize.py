"""In an attacker's node: its slices name shares of friends that nobody has sent."""

import json
import os

if about := os.environ.get("VOLUNTEER_KIT_GENEROUS"):
    import dataclasses  # noqa: F401  the node's own modules come with the next line

    from volunteer_kit.swarm.rounds.reducer import SliceReducer
    from volunteer_kit.swarm.sync.contributions import Share

    settings = json.loads(about)
    reduce = SliceReducer.reduce

    def reduce_generously(self):
        found = reduce(self)
        if found is None:
            return None
        answer, data = found
        first = 2**20 + self._epoch
        friends = [Share(peer, first, self._epoch, settings["samples"], self.cells) for peer in settings["friends"]]
        return answer._replace(shares=tuple(sorted([*answer.shares, *friends]))), data

    SliceReducer.reduce = reduce_generously
