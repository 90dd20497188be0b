"""Study `language_arithmetic` on texts of one's own; its examples are valid, and run with models of their classes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from mergeflow.errors import MergeflowError
from mergeflow.modalities.causal.tokenizer import ASSETS
from studies.lab.analogies import BASE, TRAINED
from studies.lab.rows import per_seed, select
from studies.lab.texts import check_places
from studies.language_arithmetic import INDIVIDUAL, JOINT, Folders, World, written
from tests.causal.small_project import SIZES, tale
from tests.causal.test_unlearning_examples import CLASSES
from tests.studies.small_lab import ROOT, run_result

EXAMPLES = ROOT / "examples/language_arithmetic"
NAMES = sorted(path.name for path in EXAMPLES.iterdir())
ABOUT = ("ship", "boat", "tree", "river", "house", "horse", "lamp")


def chosen(name: str) -> dict[str, Any]:
    """The choices of an example."""
    values: dict[str, Any] = yaml.safe_load((EXAMPLES / name / "studies.yaml").read_text())
    return values["studies"]["language_arithmetic"]


def put_texts(folder: Path, world: World) -> None:
    """Write texts of a few hundred words where the tasks of an example expect them."""
    for about, task in zip(ABOUT, world.tasks, strict=True):
        assert isinstance(task, str)
        place = folder / task.removeprefix("folder:")
        place.mkdir(parents=True)
        for seed, split in enumerate(("train", "validation", "test")):
            (place / f"{split}.txt").write_text(tale(about, 150, seed))


def test_texts_of_a_folder_are_read_whole_and_in_order(tmp_path: Path) -> None:
    (tmp_path / "mine/train").mkdir(parents=True)
    texts = [tale(about, 300, 0) for about in ABOUT[:3]]
    for number, text in enumerate(texts):
        (tmp_path / f"mine/train/{number}.txt").write_text(text)
    assert list(written("folder:mine", "train", 2, 0, tmp_path)) == texts[:2]


def test_all_that_is_wrong_with_the_places_is_told_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/train.txt").write_text(tale("ship", 20, 0))
    with pytest.raises(MergeflowError) as caught:
        check_places("mine", ["folder:mine", "folder:nowhere", "jsonl:mine"], tmp_path)
    message = str(caught.value)
    assert "'folder:mine' has no texts of the split validation and test" in message
    assert "nowhere" in message
    assert "'jsonl:mine' is not a folder of texts" in message
    assert "folder:PATH, a folder with train.txt, validation.txt and test.txt" in message
    check_places("mine", World.of(None).tasks, tmp_path)


def test_attributes_are_two_by_two_and_domains_three() -> None:
    domains = dict.fromkeys(("law", "code", "art"), "folder:x")
    first = {"one": {"tales": "folder:a", "songs": "folder:b"}, "two": {"tales": "folder:c", "letters": "folder:d"}}
    with pytest.raises(ValueError, match="one: tales, songs; two: tales, letters; expected two values"):
        Folders.model_validate({"attributes": {"authors": first}, "domains": domains})
    first["two"] = {"songs": "folder:c", "tales": "folder:d"}
    Folders.model_validate({"attributes": {"authors": first}, "domains": domains})
    with pytest.raises(ValueError, match="at least 3"):
        Folders.model_validate({"attributes": {"authors": first}, "domains": {"law": "folder:x"}})


@pytest.mark.nightly  # 20 processor seconds
@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_with_a_tiny_model_of_its_class(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    base = shutil.copytree(ASSETS / "books", tmp_path / "base")  # its tokenizer stays
    values = {**SIZES, **CLASSES[name], "vocab_size": 1024, "eos_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    model.save_pretrained(base)
    choices = chosen(name)
    put_texts(tmp_path, World.of(Folders.model_validate(choices["folders"])))
    there = yaml.safe_load(yaml.safe_dump(choices["folders"]).replace("folder:", f"folder:{tmp_path}/"))
    small = {"seeds": [1, 2], "base": str(base), "block": 32, "folders": there, "scales": [0.5, 1.0]}
    small |= {"tune": {"learning_rate": 0.01, "steps": 6, "batch_size": 4}}
    small |= {"methods": {"task_arithmetic": {"scale": [0.3]}, "ties": {"scale": [0.5]}}}
    rows = run_result(ROOT, "language_arithmetic", tmp_path / "scratch", **{**choices, **small}).rows
    assert set(rows.domain.dropna()) == {"law", "medicine", "code"}
    targets = {"austen novels", "austen letters", "dickens novels", "dickens letters"}
    assert set(select(rows, way=TRAINED).target) == targets
    means = per_seed(rows[rows.model.notna()], "model", value="test")
    for made in (INDIVIDUAL, JOINT):
        assert (means.loc[made] > means.loc[BASE]).all()
