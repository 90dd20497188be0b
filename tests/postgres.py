"""A PostgreSQL server for tests: Debian's package, started as an unprivileged user in a scratch folder."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POSTGRES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
"""Folders with the server's programs, newest first; none: the package is not installed."""


@contextmanager
def postgres_server() -> Iterator[str]:
    """Run a server on a socket until the block ends; its SQLAlchemy address."""
    folder = Path(subprocess.check_output(["mktemp", "-d", "/tmp/mergeflow-pg-XXXXXX"], text=True).strip())
    user = "postgres" if os.geteuid() == 0 else None  # the server refuses to run as root
    if user is not None:
        shutil.chown(folder, user)
    env = {"PATH": f"{POSTGRES[0]}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8"}

    def run(*command: str, check: bool = True) -> None:
        subprocess.run(command, check=check, user=user, env=env, cwd=folder, stdout=subprocess.DEVNULL)

    run("initdb", "-D", f"{folder}/data", "-U", "mergeflow", "--auth=trust", "--no-sync", "--locale=C.UTF-8")
    options = f"-c listen_addresses='' -k {folder} -c fsync=off"
    run("pg_ctl", "-D", f"{folder}/data", "-l", f"{folder}/log", "-w", "-o", options, "start")
    try:
        yield f"postgresql://mergeflow@/postgres?host={folder}"
    finally:
        run("pg_ctl", "-D", f"{folder}/data", "-m", "immediate", "stop", check=False)  # a test may have stopped it
        shutil.rmtree(folder)
