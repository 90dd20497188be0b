"""People who come from mergekit: its names are recognised, and each message says what they are here."""

import re

import pytest
import torch

from mergeflow.checkpoints import fingerprint, open_checkpoint, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import configure, load_recipe, make_recipe, merge, methods
from mergeflow.merging.catalog import OTHER_NAMES as METHODS


@pytest.mark.parametrize("name", METHODS)
def test_names_of_methods(name):
    assert METHODS[name].split()[0] in methods()
    assert name not in methods()
    with pytest.raises(MergeflowError, match=re.escape(f"mergekit's '{name}' is '{METHODS[name]}' here")):
        configure(name)


@pytest.mark.parametrize(
    ("method", "argument", "message"),
    [
        ("ties", "density", "mergekit's 'density' is `keep` here"),
        ("dare", "density", "mergekit's 'density' is `drop = 1 - density` here"),
        ("breadcrumbs", "density", "`beta = 1 - density - gamma` here"),
        ("della", "epsilon", r"`window = 2 \* epsilon` here"),
        ("task_arithmetic", "lambda", "`scale` here"),
        ("sce", "select_topk", "`keep` here"),
        ("karcher", "max_iter", "`iterations` here"),
    ],
)
def test_names_of_arguments(method, argument, message):
    with pytest.raises(MergeflowError, match=f"unknown argument of {method} '{argument}'.*{message}"):
        configure(method, {argument: 0.5})


def test_a_configuration_given_as_recipe(tmp_path):
    path = tmp_path / "config.yml"
    path.write_text("merge_method: slerp\nbase_model: a\nslices: []\nparameters: {t: 0.5}\n")
    with pytest.raises(MergeflowError, match=r"is a configuration of mergekit, not a recipe. `mergeflow convert"):
        load_recipe(path)


def test_home_and_ids_in_a_recipe(files, monkeypatch):
    """A recipe reads `~` and the Hub's cache, and records the commit."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setenv("HOME", str(files))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(files / "hub"))
    commit = "abc123" + "0" * 34
    (files / "hub/models--acme--base/refs").mkdir(parents=True)
    (files / "hub/models--acme--base/refs/main").write_text(commit)
    snapshot = files / "hub/models--acme--base/snapshots" / commit
    snapshot.mkdir(parents=True)
    with open_checkpoint(files / "base.safetensors") as base:
        write_checkpoint(snapshot / "model.safetensors", {name: torch.clone(base[name]) for name in base})
    plain = {"method": "average", "experts": [str(files / "expert0.safetensors")]}
    merged = merge(make_recipe({**plain, "base": "acme/base", "experts": ["~/expert0.safetensors"], "out": "~/out"}))
    assert merged.recipe.base == f"acme/base@{commit}"
    assert (files / "out" / "model.safetensors").is_file()
    again = merge(make_recipe({**plain, "base": str(files / "base.safetensors"), "out": str(files / "again")}))
    with open_checkpoint(files / "out") as first, open_checkpoint(files / "again") as other:
        assert fingerprint(first) == fingerprint(other)
    assert again.inputs["base"] == merged.inputs["base"]
