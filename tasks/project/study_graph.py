"""studies/params.yaml, checked before anything reads it, and studies/dvc.yaml, written from it and the declarations."""

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from mergeflow import layout
from mergeflow.checkpoints import write_text
from mergeflow.data.address import default_root
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.schema import faults_of, refusal
from mergeflow.yaml_text import kind_of, parse_yaml
from tasks.project.files import read_yaml
from tasks.project.parameters import StudyParams, load_params, load_study_params
from tasks.project.stage import CHOICES, INPUTS, STUDIES, named_inputs
from tasks.project.studies import EMBEDDED, find_study_modules, load_declaration, study_text

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def read_study_file(path: Path) -> dict[str, Any]:
    """Return the file's content, unless it is no mapping of seeds, runs and studies, or its seeds or runs cannot be."""
    file = f"{path.parent.name}/{path.name}"
    try:
        content = parse_yaml(path.read_text("utf-8"), file)
    except UnicodeDecodeError as error:
        raise MergeflowError(f"{file} is not UTF-8 at byte {error.start}: save it as UTF-8.") from None
    if not isinstance(content, dict):
        raise MergeflowError(f"{file} must be a mapping of seeds, runs and studies, found {kind_of(content)}.")
    faults = [*_seed_faults("seeds", content.get("seeds")), *_run_faults(content), *_study_faults(content)]
    if not isinstance(content.get("seeds"), list):
        faults.insert(0, f"seeds: must be a list of whole numbers, found {kind_of(content.get('seeds'))}")
    if faults:
        raise refusal(file, faults)
    return content


def _run_faults(choices: dict[str, Any]) -> Iterator[str]:
    runs, seeds = choices.get("runs"), choices.get("seeds")
    if not isinstance(runs, dict):
        yield (
            f"runs: must be a mapping of training runs, such as `experts: {{}}`, or `{{}}` where no study reads one, "
            f"found {kind_of(runs)}"
        )
        return
    for name, changes in runs.items():
        if not _NAME.fullmatch(name):
            yield f"run '{name}': use letters, digits, '-' and '_' in its name, which is a folder's too"
        if not isinstance(changes, dict):
            yield f"runs.{name}: must be a mapping, `{{}}` where it changes nothing, found {kind_of(changes)}"
            continue
        if "checkpoints" in changes:
            yield from _pattern_faults(f"runs.{name}.checkpoints", changes["checkpoints"])
        if isinstance(seeds, list) and isinstance(count := changes.get("seeds"), int) and count > len(seeds):
            yield f"runs.{name}.seeds: there are {len(seeds)} seeds, found {count}"


def _pattern_faults(place: str, pattern: Any) -> Iterator[str]:
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(pattern) if name is not None}
    except (ValueError, TypeError) as error:
        yield f"{place}: must be a path with {{task}}, found {pattern!r} ({error})"
        return
    if others := sorted(names - {"task", "seed"}):
        yield f"{place}: {{task}} and {{seed}} are put in, found {', '.join(f'{{{name}}}' for name in others)}"


def _study_faults(content: dict[str, Any]) -> Iterator[str]:
    studies = content.get("studies")
    for name, choices in studies.items() if isinstance(studies, dict) else ():
        if isinstance(choices, dict):
            yield from _seed_faults(f"studies.{name}.seeds", choices.get("seeds"))


def _seed_faults(place: str, seeds: Any) -> Iterator[str]:
    """Yield the faults of seeds as a set of repetitions; the loader refuses anything but a list of whole numbers."""
    if isinstance(seeds, list) and all(isinstance(seed, int) for seed in seeds):
        yield from (
            f"{place}: {seed} is given twice; name each seed once" for seed, n in Counter(seeds).items() if n > 1
        )
        yield from (f"{place}: must be from 0 to 2^63 - 1, found {seed}" for seed in seeds if not 0 <= seed < 2**63)


_SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class ChosenStudy:
    """A study of the project, with what its declaration makes of the project's choices."""

    name: str
    module: str
    runs: tuple[str, ...]
    splits: tuple[str, ...]
    systems: tuple[str, ...]


def check_study_options(root: Path, params: StudyParams) -> list[ChosenStudy]:
    """Check the section of each study in studies/params.yaml against what the study declares."""
    modules = find_study_modules(root)
    chosen, faults = [], unchosen(root, params.studies)
    for name, section in params.studies.items():
        if name not in modules:
            faults.append(str(unknown_name("study", name, modules)))
            continue
        try:
            chosen.append(_chosen(root, name, modules[name], section, params))
        except ValidationError as error:
            options = load_declaration(root, modules[name], name).options
            faults += [f"studies.{name}: {fault}" for fault in faults_of(error, options)]
        except MergeflowError as error:
            faults.append(str(error))
    if faults:
        raise refusal(CHOICES, faults)
    return chosen


def unchosen(root: Path, sections: Mapping[str, object]) -> list[str]:
    """Return one fault for each study in the project's own folder that has no section in studies/params.yaml."""
    names = (name for name, module in find_study_modules(root).items() if module.endswith(".py"))
    return [
        f"the study in studies/{name}.py has no choices: add `{name}: {{…}}` to `studies`, or remove that file"
        for name in names
        if name not in sections
    ]


def _chosen(root: Path, name: str, module: str, section: object, params: StudyParams) -> ChosenStudy:
    declared = load_declaration(root, module, name)
    options: BaseModel = declared.options.model_validate(section)
    runs, splits = tuple(dict.fromkeys(declared.runs(options))), declared.splits
    faults = [str(unknown_name("run", run, params.runs)) for run in runs if run not in params.runs]
    faults += [str(unknown_name("split", split, _SPLITS)) for split in splits if split not in _SPLITS]
    if faults:
        raise MergeflowError(f"studies.{name} reads what does not exist: {' '.join(faults)}")
    return ChosenStudy(name, module, runs, splits, declared.systems)


_HEAD = """\
# The studies' graph, which reads what the stages of ../dvc.yaml make. `mergeflow study` writes this file from what each
# study declares and from the choices in params.yaml: edit those. `mergeflow study NAME` runs one study and what it
# needs, `dvc repro studies/dvc.yaml:NAME` does the same without MLflow.
"""
_TRAIN = "train"
_JUDGING = ["tasks", "model", "evaluation"]


def study_graph(root: Path, params: StudyParams) -> str:
    chosen = check_study_options(root, params)
    stages = {study.name: _body(root, study, params.studies[study.name]) for study in chosen}
    training = {_TRAIN: _training()} if params.runs else {}  # DVC takes no `foreach` over nothing
    return _HEAD + yaml.safe_dump({"stages": training | stages}, sort_keys=False, width=200, allow_unicode=True)


def check_study_graph(root: Path, params: StudyParams) -> None:
    """Check the choices of every study, and that studies/dvc.yaml is what they and the declarations ask for."""
    if study_graph(root, params) != (root / STUDIES).read_text("utf-8"):
        raise MergeflowError(
            f"{STUDIES} is not what the studies declare and {CHOICES} chooses: run `mergeflow study`, which writes it."
        )


def chosen_graph(root: Path) -> str:
    """Return the text of studies/dvc.yaml for what the project's studies/params.yaml chooses."""
    read_study_file(root / CHOICES)
    return study_graph(root, load_study_params(root / CHOICES, load_params(root / "params.yaml")))


def write_study_graph(root: Path) -> None:
    """Bring studies/dvc.yaml up to date; a file that says the same already is not touched."""
    text = chosen_graph(root)
    if not (root / STUDIES).exists() or (root / STUDIES).read_text("utf-8") != text:
        write_text(root / STUDIES, text)


def names_differ(root: Path) -> bool:
    """Whether studies/dvc.yaml lacks a study that studies/params.yaml chooses, or has another one. Imports no study."""
    if not (root / CHOICES).exists():
        return False
    sections = read_study_file(root / CHOICES).get("studies") or {}
    if faults := unchosen(root, sections):
        raise refusal(CHOICES, faults)
    stages = read_yaml(root / STUDIES)["stages"] if (root / STUDIES).exists() else {}
    return set(stages) - {_TRAIN} != set(sections)


def _body(root: Path, study: ChosenStudy, choices: object) -> dict[str, Any]:
    """Return the stage of a study, which is stale too when files below `inputs` that its choices name have changed."""
    judging = _JUDGING if study.splits else _JUDGING[:-1] if study.runs else []
    section = [f"studies.{study.name}"]
    deps = [layout.BASE] if judging else []
    deps += [f"{layout.DATA}/{split}" for split in study.splits]
    deps += [layout.study_run(run) for run in study.runs]
    deps += [INPUTS] if set(named_inputs(choices)) - {default_root(EMBEDDED.rstrip(":"))} else []
    title = study_text(root, study.module)[0]
    return {
        "desc": title.partition(": ")[2] or title,
        "wdir": "..",
        "cmd": f"mergeflow stage run {study.name}",
        "meta": {"run": study.module, "systems": list(study.systems)},
        "params": [*judging, {CHOICES: ["seeds", *section] if judging else section}, {layout.CODE: [study.name]}],
        **({"deps": deps} if deps else {}),
        "outs": [{layout.study(study.name): {"persist": True}}],
    }


def _training() -> dict[str, Any]:
    return {
        "foreach": "${runs}",
        "do": {
            "desc": "Fine-tune all tasks in one way, for every seed",
            "wdir": "..",
            "cmd": f"mergeflow stage run {_TRAIN} --item ${{key}}",
            "meta": {"run": "studies.lab.runs"},
            "params": [*_JUDGING, {CHOICES: ["seeds", "runs.${key}"]}, {layout.CODE: [f"{_TRAIN}.${{key}}"]}],
            "deps": [layout.BASE, f"{layout.DATA}/train", f"{layout.DATA}/validation"],
            "outs": [{layout.study_run("${key}"): {"persist": True}}],
        },
    }
