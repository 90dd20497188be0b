"""The page of costs: its tables are those of the records and of the examples, and what it says of tests is so."""

import re
from pathlib import Path

import pytest

from mergeflow.data.splits import CARVED_FRACTION, CARVED_LIMIT
from tasks.project.parameters import load_params, load_study_params
from tasks.studies.costing import COUNTED, EIGHT, EXAMPLES, MERGES, studies_table, trained, written
from tasks.studies.papers.projection.study import mergeable
from tasks.studies.split_sizes import SPLITS
from tests.studies import test_real_dry_run
from tests.studies.documented import projects
from tests.studies.small_lab import ROOT

PAGE = ROOT / "docs/study-costs.md"
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def test_the_tables_are_what_records_and_examples_give() -> None:
    """`python -m tasks.studies.costing docs/study-costs.md` writes them."""
    text = PAGE.read_text()
    assert text == written(text, ROOT)
    assert re.findall(r"<!-- costs: (\w+) -->", text) == ["runs", "real", "studies", "sums"]


def test_no_time_of_a_study_is_typed() -> None:
    """Beside the tables there is no time but those that have no record: of a step, of factoring, and a goal."""
    typed = re.sub(r"<!-- costs.*?<!-- end -->", "", PAGE.read_text(), flags=re.S)
    found = re.findall(r"[\d.]+ (?:s|h|min|minutes)\b", typed)
    assert found == ["0.036 s", "0.071 s", "90 minutes", "10 minutes"]


@pytest.mark.parametrize("family", ["rounds", "cart"])
def test_every_study_of_an_example_is_counted(family: str) -> None:
    for size in EXAMPLES.values():
        folder = ROOT / "examples/studies" / f"{family}_{size}"
        studies = load_study_params(folder / "studies.yaml", load_params(folder / "params.yaml")).studies
        asked = {name for name, (where, *_) in COUNTED.items() if where == family}
        assert studies.keys() <= asked
    assert COUNTED.keys() <= projects().keys()
    assert len(mergeable(EIGHT)) == MERGES
    cells = [line.split(" | ") for line in studies_table(ROOT).splitlines()[2:]]
    empty = {re.findall(r"\w+", row[0])[0] for row in cells if not row[3]}
    assert empty == {"equivalence", "alignment", "interference", "adviser_regimes", "structure_suite", "bases"}
    assert all(f"`{name}`" in PAGE.read_text().partition("A study without an estimate")[2] for name in empty)


def test_images_are_counted_as_training_takes_them() -> None:
    common = {"regime": "steps", "steps": 2000, "batch_size": 128}
    assert trained({"tasks": 20}, common, 3, 64) == (3 * 20 * 2000 * 128,) * 2
    assert trained({"regime": "joint", "seeds": 1}, common, 3, 64) == (8 * 2000 * 128,) * 2
    epoch = sum(train for train, *_ in list(SPLITS.values())[:4])
    run = {"tasks": 4, "regime": "epochs", "epochs": 5, "batch_size": 8}
    assert trained(run, common, 3, 64) == (15 * epoch, 8 * 15 * epoch)


def test_splits_are_carved_as_the_program_does() -> None:
    """Published: the images that train has where validation is carved from it."""
    published = {"cars": 8144, "gtsrb": 26640, "mnist": 60000, "sun397": 19850, "svhn": 73257, "food101": 75750}
    published |= {"oxford_iiit_pet": 3680, "stl10": 5000, "fer2013": 28709, "emnist": 240000, "cifar10": 50000}
    for task, whole in published.items():
        train, validation, _ = SPLITS[task]
        assert train + validation == whole
        assert abs(validation - min(CARVED_LIMIT, CARVED_FRACTION * whole)) < 2


def test_the_studies_that_are_dry_run_are_as_many_as_the_page_says() -> None:
    text = " ".join(PAGE.read_text().split())
    for example, (_, studies) in test_real_dry_run.EXAMPLES.items():
        assert re.search(rf"{NUMBERS[len(studies) - 1]}(?: studies)? of `{example}`", text), example


def test_commands_to_the_first_study_are_the_same_on_both_pages() -> None:
    pages = (PAGE, ROOT / "examples/studies/README.md")
    listed = [re.findall(r"^(?:cp|mkdir|mergeflow new) .*$", Path(page).read_text(), re.MULTILINE) for page in pages]
    assert listed[0] == listed[1]
    assert len(listed[0]) == 4
