"""docs/sweep.md and the examples: every key is there, what stands there is valid, and its Python runs."""

import re
from pathlib import Path

import pytest
import yaml

from mergeflow.merging import make_recipe
from mergeflow.search.sweep_file import (
    CommandScore,
    FunctionScore,
    LmEvalScore,
    ModelPart,
    SearchPart,
    Sweep,
    TaskPart,
    load_sweep,
    make_sweep,
)
from tests.evaluation.small import sweep_values

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/sweep.md").read_text()
EXAMPLES = sorted((ROOT / "examples/sweeps").glob("*.yaml"))


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, flags=re.S)


def test_every_key_is_on_the_page():
    for model in (Sweep, ModelPart, TaskPart, SearchPart):
        for name in model.model_fields:
            assert re.search(rf"\b{name}:", PAGE), name
    for part in (FunctionScore, CommandScore, LmEvalScore):
        for name in part.model_fields:
            assert re.search(rf"\b{name}:|`{name}`", PAGE), name


def test_the_pages_yaml_is_valid():
    examples = [yaml.safe_load(text) for text in blocks("yaml")]
    assert len(examples) == 3
    assert set(examples[0]) == set(Sweep.model_fields) - {"search", "score", "tokenizer", "chat_template", "allow"}
    for values in examples:
        assert make_recipe(values) if "method" in values else make_sweep(values)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid(path: Path):
    sweep = load_sweep(path)
    assert path.read_text().count("# ") >= 3
    assert sweep.search is not None or len(sweep.grid()) > 3


def test_the_pages_python_runs(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    values = sweep_values(world, methods={"average": {}})
    Path("sweep.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    names: dict[str, object] = {}
    for text in blocks("python"):
        exec(text, names)
    assert isinstance(names["rows"], list)
    assert set(names["rows"][0]) == {"trial", "method", "args", "accuracy", "mean", "normalised", "objective"}
