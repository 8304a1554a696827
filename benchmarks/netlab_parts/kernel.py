"""What netlab asks of the kernel: commands of iproute2, and the namespace that a thread lives in."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18


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
    """Make the calling thread, and all that it begets, live in the network namespace `name`; with the names of its own
    /etc/hosts, if it has been given some (`ip netns exec` does the same)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"could not enter the network namespace {name}")
    hosts = hosts_of(name)
    if hosts.exists():
        steps = (
            lambda: libc.unshare(CLONE_NEWNS),
            lambda: libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
            lambda: libc.mount(bytes(hosts), b"/etc/hosts", None, MS_BIND, None),
        )
        if any(step() for step in steps):
            raise OSError(ctypes.get_errno(), f"could not mount {hosts}")


def hosts_of(name: str) -> Path:
    """The namespace's /etc/hosts."""
    return Path(f"/etc/netns/{name}/hosts")
