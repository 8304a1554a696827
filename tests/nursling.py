"""A program for tests/test_nursery.py: it says what it is, then obeys stdin."""

import json
import os
import random
import sys
import threading

import numpy
from hivemind.utils import MPFuture

from tests.orders import say


def main() -> None:
    say(
        "here",
        arguments=sys.argv[1:],
        environment=dict(os.environ),
        leads=os.getsid(0) == os.getpid() == os.getpgid(0),
        folder=os.getcwd(),
        drawn=[random.random(), numpy.random.random()],
        threads=threading.active_count(),
    )
    for line in sys.stdin:
        match json.loads(line):
            case "take the lock":
                say("taken", is_taken=MPFuture._update_lock.acquire(timeout=10.0))
            case "fail":
                raise ValueError("as it was told")
            case int(code):
                sys.exit(code)


if __name__ == "__main__":
    main()
