"""What lies in the registry's store is read and not trusted: flipped bits are named, code is not executed."""

from pathlib import Path

import pytest

from mergeflow.checkpoints import fingerprint, open_checkpoint
from mergeflow.errors import MergeflowError
from registry.artifacts import DIGESTS, input_example
from registry.gates import GateSettings
from registry.logging import FINGERPRINT
from registry.promotion import Force, promote, register, rollback
from registry.store import mlflow
from registry.versions import current, download, history, load
from tests.tasks.test_recorded import flip_a_bit

from .test_promotion import champions

GATES = GateSettings()
FORCE = Force("ada", "it must go live")
INSIDE = ["model.safetensors", "heads/000.safetensors", "model.json", "recipe.json"]


@pytest.fixture
def two(store, make_candidate):
    champions(store, make_candidate, 2)
    return store


def folder_of(store, version: str) -> Path:
    return Path(store.client.get_model_version("merged", version).source.removeprefix("file://"))


@pytest.mark.parametrize("inside", INSIDE)
def test_flipped_bits_are_not_served(two, tmp_path, inside):
    flip_a_bit(folder_of(two, "2") / "artifacts/model" / inside)
    for read in (load, lambda *which: download(*which, tmp_path)):
        with pytest.raises(MergeflowError, match=r"version 2 of 'merged' is damaged: its artifacts/model .*registered"):
            read(two, "merged", "champion")


@pytest.mark.parametrize(
    "inside", ["artifacts/model/model.safetensors", "evidence/evidence.json", "evidence/scores.safetensors"]
)
def test_flipped_bits_are_not_rolled_back_to_nor_promoted_by_force(two, inside):
    flip_a_bit(folder_of(two, "1") / inside)
    for change in (
        rollback,
        lambda *model: promote(*model, 1, GATES, force=FORCE),
        lambda *model: promote(*model, 1, GATES),
    ):
        with pytest.raises(MergeflowError, match="version 1 of 'merged' is damaged"):
            change(two, "merged")
    assert current(two, "merged").champion.version == "2"
    assert len(history(two, "merged")) == 2


def test_a_damaged_version_is_registered_again_under_a_new_number(two, make_candidate):
    flip_a_bit(folder_of(two, "2") / "artifacts/model/model.safetensors")
    again = register(two, "merged", make_candidate(2, 0.8))
    assert (again.version, again.new) == ("3", True)


def test_a_version_of_the_days_without_digests_is_known_by_its_weights(store, make_candidate, model_files):
    register(store, "merged", make_candidate(1))
    as_of_former_days(store, model_files)
    assert len(load(store, "merged", 1).predict(input_example(model_files))) == 1
    flip_a_bit(folder_of(store, "1") / "artifacts/model/model.safetensors")
    with pytest.raises(MergeflowError, match="version 1 of 'merged' is damaged"):
        load(store, "merged", 1)


def as_of_former_days(store, model_files):
    """Leave of version 1 what used to be recorded: the fingerprint of its weights."""
    with open_checkpoint(model_files.weights) as state:
        store.client.set_model_version_tag("merged", "1", FINGERPRINT, fingerprint(state))
    store.client.delete_model_version_tag("merged", "1", DIGESTS)


@pytest.mark.parametrize("change", [{"model_code_path": "evil.py"}, {"loader_module": "evil", "code": "."}])
def test_no_code_of_a_version_is_executed(store, make_candidate, model_files, change, tmp_path):
    register(store, "merged", make_candidate(1))
    folder, done = folder_of(store, "1"), tmp_path / "done"
    (folder / "evil.py").write_text(f"open({str(done)!r}, 'w')")
    (folder / "served_model.py").write_text(f"open({str(done)!r}, 'w')")
    described = folder / "MLmodel"
    model = mlflow.models.Model.load(described)
    model.flavors["python_function"] |= change
    model.save(described)
    assert len(load(store, "merged", 1).predict(input_example(model_files))) == 1
    assert not done.exists()


def test_a_version_of_another_program_is_loaded_only_where_that_is_allowed(store, tmp_path):
    code = tmp_path / "other.py"
    code.write_text(
        "import mlflow\n"
        "class Other(mlflow.pyfunc.PythonModel):\n"
        "    def predict(self, context, model_input):\n"
        "        return model_input\n"
        "mlflow.models.set_model(Other())\n"
    )
    mlflow.pyfunc.save_model(tmp_path / "saved", python_model=str(code), pip_requirements=[])
    store.client.create_registered_model("merged")
    store.client.create_model_version("merged", (tmp_path / "saved").as_uri())
    with pytest.raises(MergeflowError, match=r"version 1 of 'merged' was registered by another program.*--foreign"):
        load(store, "merged", 1)
    assert load(store, "merged", 1, foreign=True).predict([1]) == [1]
