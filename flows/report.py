"""The report of a run: on disk, and with the run in MLflow."""

from pathlib import Path

from flows.plan import registration_lost
from mergeflow import layout
from mergeflow.documents import read_registration


def publish_report(root: Path) -> None:
    """Write `outputs/report.html` where there are results, and log it in the version's run where it is registered."""
    results, registration = root / layout.TEST, root / layout.REGISTRATION
    if not results.exists():
        return
    from tasks.report import write_report

    report = write_report(root, root / layout.REPORT)
    if not registration.exists() or registration_lost(root):
        return
    from registry.logging import log_file
    from registry.lookup import find_version
    from registry.store import connect

    found = read_registration(registration)
    store = connect(project_root=root)
    version = find_version(store, found["model"], found["version"])
    if version.run_id:
        log_file(store, version.run_id, report)
