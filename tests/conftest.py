"""What every test may rely on."""

import signal

import pytest


@pytest.fixture(autouse=True)
def interrupts_arrive():
    """hivemind sets SIGINT to "ignore" in the process that builds an averager; the next test must not inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)
