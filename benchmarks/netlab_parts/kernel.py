"""What netlab asks of the kernel: commands of iproute2, and the namespace that a thread lives in."""

from __future__ import annotations

import ctypes
import subprocess

CLONE_NEWNET = 0x40000000


class NoNetlab(OSError):
    """No namespaces, shapers or relays can be had here; says why."""


def ip(*words: str) -> str:
    return run("ip", *words)


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise NoNetlab(f"{' '.join(words)}: {done.stderr.strip()}\nNetwork namespaces and shaped lines take root.")
    return done.stdout


def works(*words: str) -> bool:
    return subprocess.run(words, capture_output=True).returncode == 0


def enter(name: str) -> None:
    """Make the calling thread, and all that it begets, live in the network namespace `name`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"could not enter the network namespace {name}")
