"""A modality and a source from outside the package, found by name: docs/extending.md and the example that it names."""

import json
import re
import shutil
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import yaml

import mergeflow.plugins
from mergeflow.errors import MergeflowError
from mergeflow.modalities.catalog import MODALITIES
from mergeflow.modalities.preparing import SOURCES, find_preparation
from mergeflow.modalities.sections import SECTIONS
from mergeflow.modalities.served import SERVED
from tasks.project.graph import load_graph
from tasks.project.new import new_project
from tasks.running.digests import Code
from tasks.running.runner import run_stage
from tests.project_folder import change_params, remember_code
from tests.toy_project import make_toy_project, run_pipeline

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extending.md").read_text().partition("## A modality\n")[2]
SOURCE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[-1]
CHOICES = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])


def write_waves(folder: Path) -> Path:
    return shutil.copytree(ROOT / "examples/modalities/waves", folder, ignore=shutil.ignore_patterns("__pycache__"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project that the page makes, which is the current one."""
    folder = make_toy_project(tmp_path / "tides")
    write_waves(folder / "modalities/waves")
    change_params(folder, CHOICES)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.slow
def test_a_project_of_its_own_modality_goes_from_prepare_to_evaluate(project: Path) -> None:
    run_pipeline(project)
    rows = {row["name"]: row for row in json.loads((project / "outputs/results/test.json").read_text())["rows"]}
    assert min(rows["individual"]["accuracy"].values()) > 0.8
    assert {"average", "cart", "ties"} <= rows.keys()
    assert SERVED.get("waves").example({"length": 8}) == dict.fromkeys([f"x{k}" for k in range(8)], 0.0)
    trained = [stage for stage in load_graph(project).values() if stage.name in ("prepare", "base", "finetune")]
    assert not any(run_stage(project, stage) for stage in trained)  # all of it is up to date


def test_each_part_counts_for_the_stages_that_use_it(project: Path) -> None:
    def digests() -> dict[str, str]:
        code = Code(project)
        return {name: code.digest(f"tasks.{name}") for name in ("prepare", "base", "finetune", "figures")}

    before = digests()
    for part, stale in {"preparation": {"prepare"}, "modality": {"base", "finetune"}}.items():
        file = project / f"modalities/waves/{part}.py"
        text = file.read_text()
        file.write_text(text + "\nCHANGED = 1\n")
        assert {name for name, digest in digests().items() if digest != before[name]} == stale
        file.write_text(text)
    sections = project / "modalities/waves/sections.py"  # the other parts import it
    sections.write_text(sections.read_text() + "\nCHANGED = 1\n")
    assert {name for name, digest in digests().items() if digest != before[name]} == {"prepare", "base", "finetune"}


def test_an_installed_package_brings_a_modality(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember_code(tmp_path)
    write_waves(tmp_path / "site/acme_waves")
    (tmp_path / "site/acme_waves/params.yaml").write_text("registry: {model: $NAME}\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    point = EntryPoint("waves", "acme_waves", "mergeflow.modalities")
    for module in (mergeflow.plugins, sys.modules["tasks.running.digests"]):
        monkeypatch.setattr(module, "entry_points", lambda group: [point] if group == point.group else [])
    assert MODALITIES.names() == ["causal", "text", "toy", "vision", "waves"]
    assert MODALITIES.get("waves").name == "waves"
    assert "acme_waves.preparation" not in sys.modules
    assert {"acme_waves.modality", "acme_waves.sections"} <= Code(tmp_path).closure("tasks.finetune").keys()
    assert (new_project(tmp_path / "tides", "waves") / "params.yaml").read_text() == "registry: {model: tides}\n"
    for name in [name for name in sys.modules if name.startswith("acme_waves")]:
        sys.modules.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sections.py": None}, "modality 'waves' has no module 'sections': add sections.py"),
        ({"sections.py": "import nowhere\n"}, "sections.py of modality 'waves' cannot be loaded, line 1 of"),
        ({"sections.py": "x = 1\n"}, "sections.py must hold one Sections of the modality 'waves', found 0"),
        ({"../toy/__init__.py": ""}, "two of the modalities are named 'toy'"),
    ],
)
def test_what_is_wrong_with_a_modality_is_said(project: Path, change: dict[str, str | None], message: str) -> None:
    for name, text in change.items():
        path = project / "modalities/waves" / name
        path.parent.resolve().mkdir(exist_ok=True)
        path.unlink() if text is None else path.resolve().write_text(text)
    with pytest.raises(MergeflowError, match=message):
        SECTIONS.get("waves")


def test_an_unknown_modality_is_told_the_nearest(project: Path) -> None:
    with pytest.raises(MergeflowError, match="unknown modality 'wavs': did you mean 'waves'"):
        MODALITIES.get("wavs")


@pytest.mark.slow
def test_a_source_of_the_project_opens_tasks_of_a_modality(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_toy_project(tmp_path / "wells")
    (folder / "sources").mkdir()
    (folder / "sources/series.py").write_text(SOURCE)
    inputs = np.random.default_rng(0).normal(size=(60, 8))
    np.savetxt(folder / "inputs/wells.csv", np.c_[inputs, inputs[:, 0] > 0], delimiter=",")
    change_params(folder, {"tasks": {"wells": "series:inputs/wells.csv"}})
    monkeypatch.chdir(folder)
    run_pipeline(folder, ("prepare",))
    manifest = json.loads((folder / "outputs/data/manifests/wells/manifest.json").read_text())
    assert manifest["class_names"] == ["class 0", "class 1"]
    assert "sources/series.py" in Code(folder).closure("tasks.prepare")
    assert "series" in find_preparation("toy").sources
    assert "series" not in find_preparation("vision").sources
    assert SOURCES.origin("series").place == "sources/series.py"
    (folder / "sources/series.py").write_text(SOURCE.replace('Source("series"', 'Source("toy"'))
    monkeypatch.setattr(SOURCES, "_outside_things", {})
    for name in [name for name in sys.modules if name.endswith(".series") and name.startswith("_mergeflow")]:
        sys.modules.pop(name)
    with pytest.raises(MergeflowError, match="the modality 'toy' has kinds of data source named 'toy' itself"):
        find_preparation("toy")
