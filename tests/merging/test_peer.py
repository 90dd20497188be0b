"""The peer itself: mergekit, in an environment of its own, merges tiny Llamas as its configuration says; so do we.

`MERGEFLOW_PEER_PYTHON` names a Python that has mergekit; without it an environment is made with uv, where packages can
be had.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from mergeflow.merging import make_recipe, merge
from mergeflow.merging.mergekit.documents import converted
from tests.merging.test_mergekit import CONFIGURATIONS
from tests.merging.tiny_models import tiny

pytestmark = pytest.mark.nightly
PEER = "mergekit==0.1.5"
RUN = """
import json, sys, traceback, torch, yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions

told = {}
for name, (file, out) in json.load(open(sys.argv[1])).items():
    try:
        config = MergeConfiguration.model_validate(yaml.safe_load(open(file)))
        run_merge(config, out, MergeOptions(copy_tokenizer=False, random_seed=0, quiet=True))
    except Exception:
        told[name] = traceback.format_exc()[-2000:]
json.dump(told, open(sys.argv[2], "w"))
"""
# Largest difference from the peer's result, over the largest change of a weight; it adds 1e-8 to norms in multislerp.
BOUND, BOUNDS = 1e-14, {"multislerp": 2e-9}
# The peer gives what stands behind the blocks the first value of a list over depth.
BEHIND = {"model.norm.weight", "lm_head.weight"}
OVER_DEPTH = ("linear-gradient", "ties-documented", "nuslerp", "nearswap")
# It rounds the number of entries that are kept; we round both cuts.
ROUNDED, ENTRIES = ("breadcrumbs", "breadcrumbs-ties"), 3


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> str:
    given = os.environ.get("MERGEFLOW_PEER_PYTHON")
    if given:
        return given
    uv, place = shutil.which("uv"), tmp_path_factory.mktemp("peer") / "env"
    if uv is None:
        pytest.skip("neither MERGEFLOW_PEER_PYTHON nor uv is there")
    for command in (
        [uv, "venv", "-q", str(place)],
        [uv, "pip", "install", "-q", "--python", f"{place}/bin/python", PEER],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            pytest.skip(f"{PEER} cannot be installed: {done.stderr[-300:]}")
    return f"{place}/bin/python"


def with_paths(config: Any, folder: Path) -> Any:
    """A configuration whose models are folders."""
    if isinstance(config, dict):
        return {
            key: str(folder / value) if key in ("model", "base_model") else with_paths(value, folder)
            for key, value in config.items()
        }
    return [with_paths(one, folder) for one in config] if isinstance(config, list) else config


@pytest.fixture(scope="module")
def results(peer: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder with all models and the peer's results, and what went wrong there, by configuration."""
    folder = tmp_path_factory.mktemp("merges")
    generator = torch.Generator().manual_seed(0)
    for name in ("base", "a", "b", "c"):
        model: Any = tiny("llama", num_hidden_layers=5).double()
        with torch.no_grad():
            for value in model.parameters() if name != "base" else ():
                value.add_(0.1 * torch.randn(value.shape, generator=generator, dtype=value.dtype))
        model.save_pretrained(folder / name)
    jobs = {}
    for which, text in CONFIGURATIONS.items():
        config = {**with_paths(yaml.safe_load(text), folder), "dtype": "float64"}
        (folder / f"{which}.yml").write_text(yaml.safe_dump(config))
        jobs[which] = str(folder / f"{which}.yml"), str(folder / f"{which}-theirs")
    (folder / "jobs.json").write_text(json.dumps(jobs))
    run = [peer, "-c", RUN, str(folder / "jobs.json"), str(folder / "told.json")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=1800, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr[-2000:]
    return folder, json.loads((folder / "told.json").read_text())


def both(folder: Path, which: str) -> list[dict[str, torch.Tensor]]:
    """The base, and the results of both; ours is that of the recipe that `convert` writes."""
    recipe, _ = converted([yaml.safe_load((folder / f"{which}.yml").read_text())])
    made = merge(make_recipe({**recipe, "out": str(folder / f"{which}-ours")}))
    return [
        load_file(place / "model.safetensors") for place in (folder / "base", made.path, folder / f"{which}-theirs")
    ]


@pytest.mark.parametrize("which", CONFIGURATIONS)
def test_the_peer_and_we_agree(results: tuple[Path, dict[str, str]], which: str) -> None:
    folder, told = results
    assert which not in told, told[which]
    base, ours, theirs = both(folder, which)
    assert ours.keys() == theirs.keys()
    change = max(float((ours[name] - base[name]).abs().max()) for name in ours)
    for name in ours.keys() - (BEHIND if which in OVER_DEPTH else set()):
        away = (ours[name] - theirs[name]).abs() > BOUNDS.get(which, BOUND) * change
        assert int(away.sum()) <= (ENTRIES if which in ROUNDED else 0), name
    if which in OVER_DEPTH:  # else the page says of the peer what is no longer so
        assert any(not torch.allclose(ours[name], theirs[name]) for name in BEHIND)
