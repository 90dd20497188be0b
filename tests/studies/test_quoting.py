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
