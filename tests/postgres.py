"""A PostgreSQL server for tests: Debian's package, started as an unprivileged user in a scratch folder."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.guard import end_below, guarded

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

    initdb = ["initdb", "-D", "data", "-U", "mergeflow", "--auth=trust", "--no-sync", "--locale=C.UTF-8"]
    subprocess.run(initdb, check=True, user=user, env=env, cwd=folder, stdout=subprocess.DEVNULL)
    options = ["-c", "listen_addresses=", "-k", str(folder), "-c", "fsync=off"]
    with (folder / "log").open("w") as log:
        command = guarded(["postgres", "-D", "data", *options], user or "")
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        while subprocess.run(["pg_isready", "-q", "-h", folder], env=env, check=False).returncode:
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
        yield f"postgresql://mergeflow@/postgres?host={folder}"
    finally:
        end_below(process.pid)
        process.wait()
        shutil.rmtree(folder)
