"""The report: one HTML page of a finished run, which needs nothing but a browser."""

from pathlib import Path


def write_report(root: Path, target: Path) -> Path:
    """Write the report of the run in `root` to `target`, which is returned; see `tasks.report.page`."""
    from tasks.report.page import write_report as write  # matplotlib comes with it

    return write(root, target)
