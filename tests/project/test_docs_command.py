"""`mergeflow docs` shows the pages that messages and choices name."""

from functools import partial
from pathlib import Path

import pytest

from mergeflow.commands import pages
from mergeflow.errors import MergeflowError
from tests.command import invoke

ROOT = Path(__file__).parents[2]
docs = partial(invoke, pages.add_commands, "docs")


def test_every_page_is_listed_with_its_title() -> None:
    printed = docs().stdout
    for path in (ROOT / "docs").glob("*.md"):
        assert f"{path.stem} " in printed
        assert path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")[:20] in printed


@pytest.mark.parametrize("name", ["training", "training.md", "docs/training.md"])
def test_a_page_is_shown_by_its_name_as_messages_write_it(name: str) -> None:
    assert docs(name).stdout.strip() == (ROOT / "docs/training.md").read_text().strip()


@pytest.mark.parametrize("name", pages.FROM_CODE)
def test_a_page_that_is_written_from_the_code_is_listed_and_shown(name: str) -> None:
    assert pages.FROM_CODE[name][:20] in docs().stdout
    assert docs(f"docs/{name}.md").stdout.startswith("# ")


def test_an_unknown_page_gets_the_nearest() -> None:
    with pytest.raises(MergeflowError, match="unknown page 'trainning': did you mean 'training'"):
        docs("trainning", catch_exceptions=False)
