"""The page on extending: its method, recipe and commands work as they stand, from the command line."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.cli import main
from mergeflow.errors import MergeflowError
from mergeflow.merging import catalog, load_recipe, merge
from mergeflow.merging.contract import awkward, check

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with the page's method, recipe and experts; the shelf forgets it afterwards."""
    monkeypatch.setattr(catalog.METHODS, "_files", ())
    monkeypatch.setattr(catalog.METHODS, "_outside_things", {})
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods/agreed.py").write_text(blocks("python")[0])
    (tmp_path / "recipe.yaml").write_text(blocks("yaml")[0])
    base, experts = awkward(torch.float32)
    write_checkpoint(tmp_path / "base.safetensors", base)
    for name, state in zip(("cars", "dtd", "mnist"), experts.values(), strict=True):
        write_checkpoint(tmp_path / f"{name}.safetensors", state)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(monkeypatch, capsys, line: str) -> str:
    monkeypatch.setattr(sys, "argv", line.split())
    with pytest.raises(SystemExit) as done:
        main()
    shown = capsys.readouterr()
    assert not done.value.code, shown.err
    return shown.out


def test_the_page_works_as_it_stands(project, monkeypatch, capsys):
    inside, merging, outside = (block.splitlines() for block in blocks("bash"))
    shown, checked = (run(monkeypatch, capsys, line) for line in inside)
    assert "share of experts whose sign must agree" in shown
    assert "agreed keeps the contract" in checked
    assert "methods/agreed.py" in run(monkeypatch, capsys, "mergeflow methods")
    run(monkeypatch, capsys, merging[0])
    with open_checkpoint("merged.safetensors") as made:
        recorded = json.loads(made.metadata["mergeflow.recipe"])
        assert recorded["code"]["agreed"]["place"] == "methods/agreed.py"
    (project / "methods/agreed.py").rename(project / "agreed.py")
    catalog.METHODS._outside_things.clear()
    for line in outside:
        run(monkeypatch, capsys, line)


def test_the_page_s_method_keeps_the_contract_at_its_edges(project):
    for share in (0.5, 1.0):
        check("agreed", {"share": share})


def test_a_rebuild_with_other_code_is_refused_and_a_missing_file_is_named(project):
    made = merge("recipe.yaml")
    record = project / "record.json"
    record.write_text(made.recipe.record())
    assert merge(record).fingerprint == made.fingerprint
    file = project / "methods/agreed.py"
    file.rename(project / "methods/changed.py")  # loaded modules are kept: the same code under another name
    catalog.METHODS._outside_things.clear()
    text = (project / "methods/changed.py").read_text()
    (project / "methods/changed.py").write_text(text.replace("2 * args.share", "3 * args.share"))
    with pytest.raises(
        MergeflowError, match=r"'agreed' is not the one .*'methods/agreed\.py'.*this is 'methods/changed"
    ):
        load_recipe(record)
    (project / "methods/changed.py").unlink()
    catalog.METHODS._outside_things.clear()
    with pytest.raises(MergeflowError, match=r"'agreed' was declared in 'methods/agreed\.py', which is not here"):
        load_recipe(record)


def test_a_method_that_fails_is_told_in_one_message(project, monkeypatch, capsys):
    file = project / "methods/agreed.py"
    file.write_text(file.read_text().replace("return stack.base,", "return stack.base, stack.taus[7],"))
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if "stack.taus[7]" in text)
    monkeypatch.setattr(sys, "argv", ["mergeflow", "merge", "recipe.yaml", "--out", "other.safetensors"])
    with pytest.raises(SystemExit) as done:
        main()
    shown = capsys.readouterr().err
    assert done.value.code == 2
    assert f"line {line} of 'methods/agreed.py', in agreed, raised IndexError" in shown
    assert "Traceback" not in shown
    assert not (project / "other.safetensors").exists()
