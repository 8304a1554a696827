"""A PostgreSQL of our own, Debian's, that lives as long as a test run. It refuses to run as root."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg

from tests.free_ports import free_port

SETTINGS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "max_connections": "60"}
_numbers = itertools.count()


class NoPostgres(Exception):
    """Why there is none."""


@contextlib.contextmanager
def postgres() -> Iterator[Callable[[], str]]:
    """Gives what makes a new database, and its URL. Raises NoPostgres."""
    programs = _programs()
    owner = _owner()
    folder = Path(tempfile.mkdtemp(prefix="vk-postgres-", dir="/tmp"))  # pytest's own folders are closed to others
    as_owner = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []} if os.geteuid() == 0 else {}
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "cwd": "/"}
    try:
        os.chown(folder, owner.pw_uid, owner.pw_gid)
        cluster = folder / "cluster"
        initdb = [programs / "initdb", "-D", cluster, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run([*initdb, "--locale=C"], check=True, **quiet, **as_owner)
        port = free_port()  # now, and not before the seconds that initdb takes
        options = [f"-c {name}={value}" for name, value in SETTINGS.items()]
        options += [f"-p {port}", "-c listen_addresses=127.0.0.1", f"-k {folder}"]
        control = [programs / "pg_ctl", "-D", cluster, "-w", "-t", "240", "-l", folder / "log"]
        subprocess.run([*control, "-o", " ".join(options), "start"], check=True, **quiet, **as_owner)
        try:
            yield lambda: _new_database(port)
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], check=True, **quiet, **as_owner)
    finally:
        shutil.rmtree(folder)


def _new_database(port: int) -> str:
    name = f"authority_{next(_numbers)}"
    with psycopg.connect(f"postgresql://postgres@127.0.0.1:{port}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"postgresql://postgres@127.0.0.1:{port}/{name}"


def _programs() -> Path:
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    found = folders[-1] if folders else shutil.which("initdb")
    if not found:
        raise NoPostgres("PostgreSQL is not installed: apt-get install postgresql")
    return Path(found).parent


def _owner() -> pwd.struct_passwd:
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid())
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("postgres")
    return pwd.getpwnam("nobody")
