"""The report: one HTML page of a finished run, which needs nothing but a browser."""

from tasks.report.page import write_report

__all__ = ["write_report"]
