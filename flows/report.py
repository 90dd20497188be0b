"""The report of a run: on disk, and with the run in MLflow."""

import json
from pathlib import Path


def publish_report(root: Path) -> None:
    """Write `outputs/report.html` where there are results, and log it in the run of the registered version."""
    results, registration = root / "outputs/results/test.json", root / "outputs/registration.json"
    if not results.exists():
        return
    from tasks.report import write_report

    report = write_report(root, root / "outputs/report.html")
    found = json.loads(registration.read_text()) if registration.exists() else {}
    run = found.get("lineage", {}).get("run")
    if run:
        from registry.logging import log_file
        from registry.store import connect

        log_file(connect(project_root=root), run["id"], report)
