"""The version of mergeflow, as records name it."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as of_package


def version() -> str:
    """Return the installed version; "unknown" where the code runs without being installed."""
    try:
        return of_package("mergeflow")
    except PackageNotFoundError:
        return "unknown"
