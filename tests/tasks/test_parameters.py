"""params.yaml is validated whole, and every mistake is explained."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from mergeflow.errors import MergeflowError
from tasks.project.parameters import load_params, load_study_params

ROOT = Path(__file__).parents[2]


@pytest.fixture
def values() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "params.yaml").read_text())
    return loaded


def load(values: dict[str, Any], folder: Path) -> Any:
    path = folder / "params.yaml"
    path.write_text(yaml.safe_dump(values))
    return load_params(path)


def test_the_projects_own_file_is_valid() -> None:
    params = load_params(ROOT / "params.yaml")
    assert params.lookup("finetune.steps") == params.finetune.steps
    assert params.lookup_json("tasks.digits") == "suite:pocket8"


def test_all_mistakes_are_listed_at_once(values: dict[str, Any], tmp_path: Path) -> None:
    values["finetune"]["learning_rte"] = 1.0
    values["finetune"]["steps"] = "many"
    values["run"]["runner"] = "thread"
    del values["model"]["architecture"]
    with pytest.raises(MergeflowError) as caught:
        load(values, tmp_path)
    message = str(caught.value)
    assert "params.yaml has 4 faults" in message
    assert "did you mean 'learning_rate'" in message
    assert "finetune.steps" in message
    assert "'many'" in message
    assert "run.runner" in message
    assert "`architecture` is missing" in message


@pytest.mark.parametrize(
    ("model", "data", "named"),
    [
        ({"pretrained": "inputs/bert"}, {"tokenizer": "inputs/bert", "max_length": 64}, "those of text: "),
        ({"pretrained": "inputs/gpt"}, {"tokenizer": "inputs/gpt", "block": 64}, "those of causal: "),
        ({"widths": [8, 4]}, {"inputs": 8}, "those of toy: "),
        ({"pretrained": "inputs/bert"}, {}, "those of causal or text or vision: "),
    ],
)
def test_a_modality_that_is_not_named_is_taken_for_none_but_images(
    values: dict[str, Any], tmp_path: Path, model: dict[str, Any], data: dict[str, Any], named: str
) -> None:
    with pytest.raises(MergeflowError, match=f"model.modality is missing.*{named}"):
        load(values | {"model": model, "data": data}, tmp_path)
    del values["model"]["modality"]
    assert load(values, tmp_path).lookup("model.modality") == "vision"
    values["model"]["architecure"] = values["model"].pop("architecture")
    with pytest.raises(MergeflowError, match="did you mean 'architecture'"):
        load(values, tmp_path)


def test_without_a_model_nothing_is_said_of_data_which_the_modality_decides(
    values: dict[str, Any], tmp_path: Path
) -> None:
    values["modell"], values["data"] = values.pop("model"), {"inputs": 8}
    with pytest.raises(MergeflowError) as caught:
        load(values, tmp_path)
    assert "2 faults" in str(caught.value)
    assert "unknown key 'modell': did you mean 'model'?" in str(caught.value)
    assert "inputs" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "grid", "expected"),
    [
        ("teis", {"scale": [1.0]}, "did you mean 'ties'"),
        ("ties", {"keeep": [0.2]}, "keep"),
        ("ties", {"keep": [1.5]}, "keep"),
        ("cart", {"rank_ratio": []}, "is empty"),
    ],
)
def test_the_sweep_is_checked_against_the_catalog(
    values: dict[str, Any], tmp_path: Path, section: str, grid: dict[str, Any], expected: str
) -> None:
    values["sweep"] = {section: grid}
    with pytest.raises(MergeflowError, match=expected):
        load(values, tmp_path)


@pytest.mark.parametrize("name", ["Bad", "a b", "a.b", ""])
def test_task_names_are_plain(values: dict[str, Any], tmp_path: Path, name: str) -> None:
    values["tasks"][name] = "suite:pocket8"
    with pytest.raises(MergeflowError, match="cannot name a task: use a to z"):
        load(values, tmp_path)


@pytest.mark.parametrize("name", ["bad name!", "a/b", "-x", "", "a@champion", "a\n"])
def test_the_models_name_fits_an_address(values: dict[str, Any], tmp_path: Path, name: str) -> None:
    values["registry"]["model"] = name
    with pytest.raises(MergeflowError, match=r"registry\.model: the model name .* cannot be used in an address"):
        load(values, tmp_path)


@pytest.mark.parametrize("seed", [-1, 10**30])
def test_seeds_are_those_that_every_generator_takes(values: dict[str, Any], tmp_path: Path, seed: int) -> None:
    values["seed"] = values["registry"]["seed"] = seed
    with pytest.raises(MergeflowError) as caught:
        load(values, tmp_path)
    assert "2 faults" in str(caught.value)


@pytest.mark.parametrize("runs", [None, {"experts": None}, [1], {"experts": 3}])
def test_training_runs_of_studies_are_mappings(values: dict[str, Any], tmp_path: Path, runs: Any) -> None:
    params = load(values, tmp_path)
    path = tmp_path / "studies/params.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump({"seeds": [0], "runs": runs, "studies": {}}))
    with pytest.raises(MergeflowError, match=r"studies/params.yaml: runs.* must be keys with values"):
        load_study_params(path, params)


def test_no_tasks_and_no_mapping(values: dict[str, Any], tmp_path: Path) -> None:
    values["tasks"] = {}
    with pytest.raises(MergeflowError, match="tasks"):
        load(values, tmp_path)
    (tmp_path / "params.yaml").write_text("- a list")
    with pytest.raises(MergeflowError, match="mapping"):
        load_params(tmp_path / "params.yaml")
