"""Model cards: front matter, paths without the machine's own parts, and the upload of a folder."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mergeflow.checkpoints.fingerprint import matches
from mergeflow.checkpoints.folders import config_of, folder_at, folder_of
from mergeflow.checkpoints.formats import cached_id, expanded, open_checkpoint, read_json
from mergeflow.checkpoints.lora import ADAPTER_WEIGHTS
from mergeflow.checkpoints.reader import LazyStateDict, open_safetensors
from mergeflow.errors import MergeflowError, first_line
from mergeflow.merging.catalog import Code
from mergeflow.merging.files.output import CARD_HEAD, RECORD
from mergeflow.merging.files.plan import Inputs, Plan
from mergeflow.merging.files.recipe import Recipe, with_paths
from mergeflow.merging.files.steps import PREFIX, step_named
from mergeflow.merging.preflight import front_matter, licence_files, licence_of, licence_paths, merged_licence
from mergeflow.version import version
from mergeflow.yaml_text import in_words

_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def front_matter_of(recipe: Recipe, inputs: Inputs) -> dict[str, Any]:
    """Return the metadata of the card: base_model, relation, library, licence, task, tags."""
    places = owners_of(recipe)
    ids = [hub_id(path, _local(name, path, inputs)) for name, path in places.items() if not step_named(path)]
    base_ids = list(dict.fromkeys(base_id for base_id in ids if base_id is not None))
    card = front_matter(folder_of(inputs.base))
    licence, _ = merged_licence(licences_of(recipe, inputs))
    adapter = recipe.adapter is not None
    library = "peft" if adapter else _library(inputs.base) or card.get("library_name")
    matter = {
        "library_name": library,
        "base_model": base_ids,
        "base_model_relation": ("adapter" if adapter else "merge") if base_ids else None,
        **licence,
        "pipeline_tag": card.get("pipeline_tag"),
        "language": card.get("language"),
        "tags": ["merge", "mergeflow", "model-merging", recipe.method],
    }
    return {key: value for key, value in matter.items() if value}


def owners_of(recipe: Recipe) -> dict[str, str]:
    """Return the paths of all models that a recipe and its steps read, by what they are."""
    base = {"base": recipe.base} if recipe.base is not None else {}
    given = {**base, **dict(recipe.experts), **dict(recipe.task_vectors)}
    for name, step in recipe.steps or ():
        if isinstance(step, Recipe):
            given |= {f"{PREFIX}{name}/{owner}": path for owner, path in owners_of(step).items()}
        else:
            given |= {f"{PREFIX}{name}/{number + 1}": path for number, path in enumerate(dict.fromkeys(step.paths()))}
    return given


def licences_of(recipe: Recipe, inputs: Inputs) -> dict[str, dict[str, str]]:
    """Return the licence of each model that is read, as its card names it; results of steps have none of their own."""
    paths = {name: path for name, path in owners_of(recipe).items() if not step_named(path)}
    return {name: licence_of(folder_at(_local(name, path, inputs))) for name, path in paths.items()}


def write_licences(recipe: Recipe, inputs: Inputs, folder: Path) -> None:
    """Give a result's folder, which may have the base's, the licence files of its inputs; its own keeps its name."""
    licences = licences_of(recipe, inputs)
    merged, _ = merged_licence(licences)
    paths = {name: path for name, path in owners_of(recipe).items() if name in licences}
    folders = {name: folder_at(_local(name, path, inputs)) for name, path in paths.items()}
    holder = next((name for name, licence in licences.items() if licence and licence == merged), None)
    for path in licence_paths(folder):
        path.unlink()
    for name, content in licence_files(folders, holder).items():
        (folder / name).write_bytes(content)


def _local(name: str, path: str, inputs: Inputs) -> str:
    """Return where a model lies that a recipe names by a path, an id or a reference."""
    return inputs.paths.get(name, inputs.paths.get(path, str(expanded(path))))


def hub_id(path: str, place: str) -> str | None:
    """Find the Hub's id of an input: by the recipe, by its place in the Hub's cache, or by its own config.json."""
    if not expanded(path).exists() and _ID.fullmatch(path.partition("@")[0]):
        return path.partition("@")[0]
    cached = cached_id(str(Path(place).absolute()))
    if cached is not None:
        return cached
    config = (folder_at(str(expanded(place))) or Path()) / "config.json"
    named = read_json(config).get("_name_or_path") if config.is_file() else None
    return named if isinstance(named, str) and _ID.fullmatch(named) and not Path(named).exists() else None


def _library(state: LazyStateDict) -> str | None:
    folder = folder_of(state)
    if "model_type" in config_of(state):
        return "transformers"
    return "open_clip" if folder is not None and (folder / "open_clip_config.json").is_file() else None


def as_yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)


def published(recipe: Recipe) -> Recipe:
    """Return a recipe without absolute paths, for what is stored with the result.

    A path below the current folder is relative to it, any other absolute one its shortest end that no other input has;
    ids, references and relative paths stay as they are. The recipe makes the result again in a folder that has its
    inputs by these names; their fingerprints tell whether they are the same.
    """
    return _here(with_paths(recipe, _shortened(list(_all_paths(recipe))).__getitem__))


def _all_paths(recipe: Recipe) -> Iterator[str]:
    yield from recipe.paths()
    for _, step in recipe.steps or ():
        yield from _all_paths(step) if isinstance(step, Recipe) else step.paths()


def _here(recipe: Recipe) -> Recipe:
    """Return a recipe, and its steps, without the places of its result and of methods' files."""
    steps = tuple((name, _here(step) if isinstance(step, Recipe) else step) for name, step in recipe.steps or ())
    code = tuple((name, Code(place=public_name(file.place), sha256=file.sha256)) for name, file in recipe.code or ())
    return recipe.model_copy(
        update={"steps": steps or None, "out": recipe.out and public_name(recipe.out), "code": code or None}
    )


def public_name(path: str) -> str:
    """Return a path without this machine's folders: relative to the current folder where it is below, else its name."""
    return _shortened([path])[path]


def _shortened(paths: Sequence[str]) -> Mapping[str, str]:
    shortened = {path: _below(path) for path in paths}
    outside = {path: expanded(path).parts[1:] for path, short in shortened.items() if short is None}
    taken = {short for short in shortened.values() if short is not None}
    for path, parts in outside.items():
        others = [other for other in outside.values() if other != parts]
        depth = 1
        while depth < len(parts) and (
            any(other[-depth:] == parts[-depth:] for other in others) or "/".join(parts[-depth:]) in taken
        ):
            depth += 1
        shortened[path] = "/".join(parts[-depth:])
    return {path: short or path for path, short in shortened.items()}


def _below(path: str) -> str | None:
    """Return a path that names nothing of this machine; None where an absolute one must be shortened."""
    whole = expanded(path)
    if not whole.is_absolute():
        return path
    folder = Path.cwd()
    inside = os.path.commonpath([folder, whole]) == str(folder) and folder != Path(folder.root) and whole != folder
    return str(whole.relative_to(folder)) if inside else None


def model_card(
    recipe: Recipe, plan: Plan, opened: Inputs, result: str, inputs: Mapping[str, str], notes: Iterable[str] = ()
) -> str:
    """Return the card: what was merged, how, with which fingerprints, and how to make it again; further notes."""
    method, public = plan.call.method, published(recipe)
    again = json.dumps(json.loads(public.record()), indent=2, ensure_ascii=False)
    treatment = "\n".join(["```", *plan.treatment.lines(), "```\n"]) if plan.treatment.treated else ""
    more = "\n".join(["```", *notes, "```\n"]) if notes else ""
    warnings = "\n".join(
        ["The inputs differ in more than their weights:\n", *(f"- {warning}" for warning in opened.warnings), "\n"]
    )
    return f"""{CARD_HEAD}{as_yaml(front_matter_of(recipe, opened))}---
# Merged model: {recipe.method} of {len(plan.experts)} experts

{method.summary}

```
{method.section("")}
```

Source: {" ".join(method.section("Source").split())}

{diagram(public, plan)}
{_table(public, recipe, opened, inputs)}

Fingerprint of the result: `{result}`.
{plan.tensors} tensors, {plan.parameters:,} parameters. Made by mergeflow {version()}.
{treatment}{more}
{warnings if opened.warnings else ""}\
To make it again, save this as `recipe.json` in a folder that has the inputs by these names, and run
`mergeflow merge recipe.json`:

```json
{again}
```
"""


def _table(public: Recipe, recipe: Recipe, opened: Inputs, inputs: Mapping[str, str]) -> str:
    licences = licences_of(recipe, opened)
    rows = ["| input | name | licence | fingerprint |", "|---|---|---|---|"]
    for name, path in owners_of(public).items():
        licence = licences.get(name, {})
        licence_name = licence.get("license_name", licence.get("license", ""))
        rows.append(
            f"| {_cell(name)} | `{_cell(path)}` | {_cell(licence_name)} | `{inputs.get(name, 'not read whole')}` |"
        )
    return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def diagram(recipe: Recipe, plan: Plan) -> str:
    """Return the recipe as a diagram that the Hub and GitHub draw (Mermaid)."""
    weights = {name: str(weight) for name, weight in recipe.expert_weights().items() if weight != 1}
    weights |= dict.fromkeys(recipe.varied_weights(), "by depth or name")
    lines = [f'  merge{{{{"{_label(recipe.method)}<br>{_label(in_words(plan.call.args))}"}}}} --> result(["result"])']
    vectors, steps = dict(recipe.task_vectors), {PREFIX + name for name, _ in recipe.steps or ()}
    if recipe.base is not None:
        lines.insert(0, f'  base["base{_of(recipe.base, steps)}"] --> merge')
    paths = {**dict(recipe.experts), **vectors}
    for number, name in enumerate(plan.experts):
        kind = " (task vector)" if name in vectors else _of(paths[name], steps)
        edge = f'-- "{_label(weights[name])}" -->' if name in weights else "-->"
        lines.append(f'  expert{number}["{_label(name)}{kind}"] {edge} merge')
    return "\n".join(["```mermaid", "graph LR", *lines, "```", ""])


def _of(path: str, steps: set[str]) -> str:
    return f" ({_label(path)})" if path in steps else ""


def _label(text: str) -> str:
    """Return text as it may stand in quotes of a diagram."""
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")


@dataclass(frozen=True)
class Push:
    """An upload: the model's id, files with their sizes in bytes, the commit's address; None for a dry run."""

    repo: str
    files: tuple[tuple[str, int], ...]
    url: str | None
    warnings: tuple[str, ...] = ()


def push(
    folder: str | Path, repo: str, *, private: bool = False, dry_run: bool = False, say: Callable[[str], None] = print
) -> Push:
    """Send a folder that a merge made to the Hub, as one commit.

    Args:
        folder: The folder; the files that its record lists are sent, after their weights were compared with it.
        repo: `owner/name`; the repository is made where it is not there.
        dry_run: Check all and send nothing; needs neither a network nor an account.
        say: Takes a line about what is done.
    """
    place = expanded(folder)
    if not _ID.fullmatch(repo):
        raise MergeflowError(f"'{repo}' is not the id of a model on the Hub: expected owner/name.")
    files = _files(place)
    _check_card(place)
    say(f"comparing the weights of '{place}' with its record")
    _check_weights(place)
    licence = front_matter(place).get("license")
    warnings = () if licence else ("the card names no licence: others may not use the model; write one into README.md",)
    if dry_run:
        return Push(repo, files, None, warnings)
    hub = _hub()
    try:
        hub.whoami()
    except Exception as error:  # every version of the client has another class for "nobody is logged in"
        raise MergeflowError(f"nobody is logged in to the Hub ({first_line(error)}): run `hf auth login`.") from None
    say(f"sending {len(files)} files, {sum(size for _, size in files) / 1e9:.2f} GB, to {repo}")
    try:
        hub.create_repo(repo, private=private, exist_ok=True)
        made = hub.upload_folder(
            repo_id=repo,
            folder_path=place,
            allow_patterns=[name for name, _ in files],
            commit_message="A merge made by mergeflow",
        )
    except Exception as error:  # no right to write, no network, a full quota: the client's own words say which
        raise MergeflowError(f"the Hub did not take '{place}' as {repo}: {first_line(error)}.") from None
    return Push(repo, files, str(getattr(made, "commit_url", made)), warnings)


def _files(place: Path) -> tuple[tuple[str, int], ...]:
    """Return the files of a merge's folder; what somebody put beside them stays here."""
    if not (place / RECORD).is_file():
        raise MergeflowError(f"'{place}' is not a folder that a merge made: it has no {RECORD}. Merge into a folder.")
    record = read_json(place / RECORD)
    if "part" in record:
        raise MergeflowError(f"'{place}' is a part of a merge: join the parts first, with `mergeflow merge --join`.")
    listed = [place / name for name in record.get("files", [])]
    missing = [path.name for path in listed if not path.exists()]
    if missing:
        raise MergeflowError(f"'{place}' lacks {missing}, which its {RECORD} lists: merge again.")
    files = [file for path in listed for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return tuple((str(file.relative_to(place)), file.stat().st_size) for file in sorted(files) if file.is_file())


def _check_card(place: Path) -> None:
    if not front_matter(place):
        raise MergeflowError(f"'{place / 'README.md'}' has no front matter, which the Hub reads: merge again.")


def _check_weights(place: Path) -> None:
    recorded = str(read_json(place / RECORD).get("fingerprint", ""))
    factors = place / ADAPTER_WEIGHTS  # an adapter opens as the task vector that it makes: its record is of the file
    with open_safetensors(factors) if factors.exists() else open_checkpoint(place) as state:
        if not matches(state, recorded):
            raise MergeflowError(f"the weights of '{place}' are not those that its {RECORD} records: merge again.")


def _hub() -> Any:
    try:
        from huggingface_hub import HfApi, constants
    except ImportError:
        raise MergeflowError("to push, install huggingface_hub (the extra `hub`).") from None
    if constants.HF_HUB_OFFLINE:
        raise MergeflowError("HF_HUB_OFFLINE is set, so nothing can be pushed: unset it.")
    return HfApi()
