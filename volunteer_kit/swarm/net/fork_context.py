"""Give all processes of a peer the fork context of multiprocessing, whatever the program around them has chosen.

A peer's processes share memory, locks and pipes that were made before them, so they must be forked. The default start
method belongs to the program: a script may set "spawn", and Python 3.14 begins with "forkserver". Under either of them
a process would be pickled, and the locks of a peer cannot be.
"""

from __future__ import annotations

import multiprocessing

FORK = multiprocessing.get_context("fork")
