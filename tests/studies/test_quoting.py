"""Pages that quote records say what these say."""

import re
from pathlib import Path

import pytest

from mergeflow.errors import MergeflowError
from tasks.studies.quoting import quoted
from tests.studies.documented import RESULTS, read_documented
from tests.studies.small_lab import ROOT

STORY = ROOT / "docs/linearity-in-pictures.md"


def test_the_story_of_linearity_says_what_the_records_say() -> None:
    """`make docs` writes it."""
    text = STORY.read_text()
    assert text == quoted(text, RESULTS)
    asked = set(re.findall(r"findings: (\w+)", text))
    assert asked >= {path.stem for path in RESULTS.glob("linearity_*.json")} | {"mergeability"}


def test_no_number_of_the_story_is_typed() -> None:
    """Outside of what is quoted there is no decimal number and no percentage."""
    typed = re.sub(r"<!-- findings.*?<!-- end -->", "", STORY.read_text(), flags=re.S)
    assert re.findall(r"\d+\.\d+|\d+ %", re.sub(r"\(studies/.*?\)", "", typed)) == []


def test_a_place_gets_the_findings_of_its_systems(tmp_path: Path) -> None:
    text = "Before.\n\n<!-- findings: linearity_texts L10 L16 -->\nold\n<!-- end -->\nAfter."
    made = quoted(text, RESULTS)
    assert made.startswith("Before.\n\n<!-- findings: linearity_texts L10 L16 -->\n\n- *")
    assert made.endswith("\n\n<!-- end -->\nAfter.")
    own = [one for one in read_documented("linearity_texts").findings if one.system in ("L10", "L16")]
    assert made.count("\n- *") == len(own) == 2
    assert all(one.measured in made and one.claim in made for one in own)
    assert quoted(made, RESULTS) == made


def test_what_is_not_recorded_is_not_quoted() -> None:
    with pytest.raises(MergeflowError, match="study 'nothing', which has no record"):
        quoted("<!-- findings: nothing -->\n<!-- end -->", RESULTS)
    with pytest.raises(MergeflowError, match="L99 by the study 'linearity_why', which has none"):
        quoted("<!-- findings: linearity_why L99 -->\n<!-- end -->", RESULTS)


def test_readme_and_the_page_of_the_suite_say_what_the_control_measured() -> None:
    bases = read_documented("bases")
    (accuracy,) = [table for table in bases.tables if table.title == "Mean test accuracy by base, %"]
    (lead,) = [row for row in accuracy.rows if row["model"] == "experts less average"]
    (cart,) = [one.measured for one in bases.findings if one.claim == "CART beats task arithmetic, whatever the base."]
    ahead = dict(re.findall(r"(?:^|; )([^:;]+): ([\d.]+ ± [\d.]+) points", cart))
    style = "right names, another style"
    readme, suite = ((ROOT / name).read_text() for name in ("README.md", "docs/embedded-suite.md"))
    assert f"experts are {lead[style]} points ahead of their average and CART is {ahead[style]} ahead" in readme
    assert f"these leads are {lead['right names']} and {ahead['right names']} points" in readme
    *first, last = ahead.values()
    assert f"({', '.join(first)} and {last} points)" in suite
    assert f"experts {lead[style]} points above" in suite
