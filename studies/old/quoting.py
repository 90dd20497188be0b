"""Findings in a page that is written by hand, as they were recorded: `python -m studies.old.quoting PAGE...`.

A page says `<!-- findings: STUDY SYSTEM ... -->` and `<!-- end -->`; what is between is written from the record.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mergeflow.errors import MergeflowError
from studies.old.results import StudyResult

_PLACE = re.compile(r"(<!-- findings: (\w+)((?: \w+)*) -->\n).*?(<!-- end -->)", re.S)


def quoted(text: str, results: Path) -> str:
    """Return a page with the findings that its places ask for.

    Args:
        text: of the page.
        results: the folder of the records, a JSON file for each study.

    Raises:
        MergeflowError: a place names a study that is not recorded, or a system of which it found nothing.

    Example:
        >>> quoted("No place for findings.", Path("docs/studies/results"))
        'No place for findings.'
    """
    return _PLACE.sub(lambda found: found[1] + "".join(_lines(found[2], found[3].split(), results)) + found[4], text)


def _lines(study: str, systems: list[str], results: Path) -> Iterator[str]:
    path = results / f"{study}.json"
    if not path.exists():
        raise MergeflowError(
            f"a page quotes the study '{study}', which has no record in {results}. Run it, or quote another."
        )
    found = [one for one in StudyResult.parse(path.read_text()).findings if not systems or one.system in systems]
    for system in systems:
        if system not in {one.system for one in found}:
            raise MergeflowError(
                f"a page quotes findings of {system} by the study '{study}', which has none. Mend the page."
            )
    yield "\n"
    for one in found:
        yield f"- *{one.verdict}*: {one.claim} ({one.measured})\n"
    yield "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(quoted(page.read_text(), page.parent / "studies" / "results"))
