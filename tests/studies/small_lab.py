"""A small laboratory: three tasks of drawn squares, prepared, and the studies' training runs of a few steps."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from mergeflow.checkpoints import write_checkpoint
from mergeflow.data import SPLITS, load_split
from mergeflow.modalities.heads import save_head
from mergeflow.modalities.vision.models import build_head, image_model, load_clip
from studies.commands.study import find_studies
from studies.lab import runs
from studies.lab.study import ROWS, Result, Study, read_rows
from tasks.project.graph import load_graph
from tasks.project.parameters import load_params, load_study_params
from tasks.project.stage import Stage, StageIO
from tasks.project.studies import find_study_modules, load_declaration
from tasks.running.determinism import compute_on_one_thread
from tests.evaluation.small import TASKS, prepare

ROOT = Path(__file__).parents[2]
SEEDS = [0, 1]


def make_lab(root: Path, training: dict[str, dict[str, Any]], steps: int = 4, world: Path = ROOT) -> Path:
    """Write base, data, parameters and training runs below `root`.

    Args:
        root: an empty folder.
        training: name of a run → what it changes in `finetune`; `steps` is the budget of those that say nothing.
        steps: the budget.
        world: the project whose studies the laboratory has; base and tasks are the same small ones here.
    """
    clip = load_clip("pocket-clip", "pocket8")
    write_checkpoint(root / "outputs/base/model.safetensors", image_model(clip).state())
    for task in TASKS:
        prepare(root / "work", task)
        for split in SPLITS:
            shutil.copytree(root / "work", root / f"outputs/data/{split}/{task}")
        train = load_split(root / "work", "train")
        save_head(build_head(clip, train.class_names, train.templates), root / f"outputs/base/heads/{task}.safetensors")
        shutil.rmtree(root / "work")
    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    values["tasks"] = dict.fromkeys(TASKS, "drawn")
    values["finetune"] |= {"steps": steps, "batch_size": 12}
    (root / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (root / "studies").mkdir()
    whole = yaml.safe_load((world / "studies/params.yaml").read_text()) | {"seeds": SEEDS, "runs": training}
    (root / "studies/params.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
    for name in training:
        train_run(root, name)
    return root


def link_choices(root: Path) -> Path:
    """Make a folder a project whose choices are the root's, for studies that read no outputs."""
    for name in ("params.yaml", "studies"):
        (root / name).symlink_to(ROOT / name)
    return root


def study_io(root: Path, study: str, scratch: Path, workers: int = 1, **options: Any) -> StageIO:
    """Build the inputs of a study's stage in a laboratory, with some of its choices changed."""
    stage = find_studies(ROOT)[study].stage
    small = replace(stage, deps=(*stage.deps, "outputs/studies/runs"))  # the lab has its own runs
    return open_lab(root, small, scratch, {study: options}, workers)


def run_study(root: Path, study: str, scratch: Path, workers: int = 1, **options: Any) -> Path:
    """Run a study in a laboratory, with some of its choices changed; return the folder that it wrote."""
    io = study_io(root, study, scratch, workers, **options)
    find_study(study).run(io)
    return io.scratch / "building" / io.stage.outs[0]


def run_result(root: Path, study: str, scratch: Path, workers: int = 1, **options: Any) -> Result:
    """Run a study in a laboratory, with some of its choices changed; return its rows and what it makes of them."""
    folder = run_study(root, study, scratch, workers, **options)
    declared = find_study(study)
    return Result(declared, declared.chosen(study_io(root, study, scratch, **options)), read_rows(folder / ROWS))


def rows_by_study(
    root: Path, scratch: Path, choices: Mapping[str, dict[str, Any]], **common: Any
) -> Callable[[str], pd.DataFrame]:
    """Return a function that runs a study when its rows are first asked for, and checks that it has figures."""

    @cache
    def rows(study: str) -> pd.DataFrame:
        folder = run_study(root, study, scratch / study, **common, **choices[study])
        assert list(folder.glob("*.svg"))
        return read_rows(folder / ROWS)

    return rows


def find_study(name: str) -> Study:
    """Return the study of this name."""
    study = load_declaration(ROOT, find_study_modules(ROOT)[name], name)
    assert isinstance(study, Study)
    return study


def train_run(root: Path, item: str) -> None:
    """Do one of the training runs of a laboratory that has base and data."""
    io = training_io(root, item, root / "scratch" / item)
    with io.holds:
        runs.run(io)
    (out,) = io.stage.outs
    (root / out).parent.mkdir(parents=True, exist_ok=True)
    shutil.move(io.building / out, root / out)
    shutil.rmtree(io.scratch)
    record = root / ".mergeflow" / "records" / f"{io.stage.folder_name}.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(io.costs))


def training_io(root: Path, item: str, scratch: Path, workers: int = 1) -> StageIO:
    """Build the inputs of the stage of a training run in a laboratory."""
    like = next(stage for stage in load_graph(ROOT, studies=True).values() if stage.name == "train")
    assert like.item
    keys, outs = ([text.replace(like.item, item) for text in texts] for texts in (like.params, like.outs))
    return open_lab(root, replace(like, item=item, params=tuple(keys), outs=tuple(outs)), scratch, {}, workers)


def open_lab(root: Path, stage: Stage, scratch: Path, options: dict[str, dict[str, Any]], workers: int = 1) -> StageIO:
    """Build the inputs of a stage in a laboratory; from here on this process computes on one thread, as stages do.

    It works alone unless it is told: one more process would spend longer on its imports than on a small study.
    """
    compute_on_one_thread()
    params = load_params(root / "params.yaml")
    params = params.model_copy(update={"run": params.run.model_copy(update={"workers": workers})})
    studies = load_study_params(root / "studies/params.yaml", params)
    for name, changes in options.items():
        studies.studies[name] = {**studies.studies.get(name, {}), **changes}
    scratch.mkdir(parents=True, exist_ok=True)
    return StageIO(stage, root, scratch, params, studies)


def check_two_processes(study: str, scratch: Path, **options: Any) -> None:
    """Check that two processes write what one writes, to the bit."""
    folders = [run_study(ROOT, study, scratch / str(workers), workers, **options) for workers in (1, 2)]
    alone, together = (
        {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".png"} for folder in folders
    )
    assert ROWS in alone
    assert alone == together
