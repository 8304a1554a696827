"""A node whose reducer gives the negative of each average, once a file is there. argv: the pipe's descriptor, the file.

Each cell of an answer that was so negated adds a byte to the file.
"""

import sys
from pathlib import Path

from volunteer_kit.swarm.node import process
from volunteer_kit.swarm.rounds.reducer import SliceReducer

if __name__ == "__main__":
    flag, honest = Path(sys.argv[2]), SliceReducer._average

    def average(self, cell, parts):
        found = honest(self, cell, parts)
        if not flag.exists():
            return found
        with flag.open("ab") as file:
            file.write(b"x")
        return -found

    SliceReducer._average = average
    sys.exit(process.main())
