"""The comparison of a merge's model folders, before any weight is read."""

from collections.abc import Iterator, Mapping
from filecmp import cmp
from pathlib import Path
from typing import Any

from mergeflow.checkpoints.folders import config_of, folder_of, named_folders
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.merging.preflight.configs import config_findings
from mergeflow.merging.preflight.findings import Finding
from mergeflow.merging.preflight.licences import licence_of, merged_licence
from mergeflow.merging.preflight.tokenizers import special_findings, template_findings, tokenizer_findings
from mergeflow.merging.vocabulary.tables import vocab_sizes


def compare(
    base: LazyStateDict, experts: Mapping[str, LazyStateDict], tokenizer: str | None = None, *, templated: bool = False
) -> list[Finding]:
    """Return how the experts' folders differ from the base's; a file outside a model folder says nothing.

    Args:
        base: The base.
        experts: The experts by name.
        tokenizer: Whose tokens the result has, where the recipe says it and they are aligned.
        templated: Whether the recipe says which chat template.
    """
    own, config = folder_of(base), config_of(base)
    folders = {name: folder_of(state) for name, state in experts.items()}
    configs = {name: config_of(state) for name, state in experts.items()}
    found = config_findings(config, configs, base.infos)
    if tokenizer is None:
        found += tokenizer_findings(own, folders, _resized(config, configs))
    if tokenizer not in experts:
        found += special_findings(own, folders)
        found += [] if templated else template_findings(own, folders)
    _, said = merged_licence({"base": licence_of(own), **{name: licence_of(one) for name, one in folders.items()}})
    found += [Finding("licence", said)] if said else []
    return found + [one for name, folder in folders.items() for one in _other_modules(name, own, folder)]


def _other_modules(name: str, base: Path | None, expert: Path | None) -> Iterator[Finding]:
    """Tell of folders, such as `2_Dense` of sentence-transformers, that an expert has too but with other content."""
    for module in set(named_folders(base)) & set(named_folders(expert)) if base and expert else ():
        assert base is not None
        assert expert is not None
        files = sorted(path.relative_to(base) for path in (base / module).rglob("*") if path.is_file())
        other = [file for file in files if not _same_file(base / file, expert / file)]
        if other:
            yield Finding("modules", f"modules: '{name}' has another '{other[0]}'; the result has the base's")


def _same_file(a: Path, b: Path) -> bool:
    return b.is_file() and cmp(a, b, shallow=False)


def _resized(base: Mapping[str, Any], experts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Say which experts have another number of rows for tokens."""
    own = vocab_sizes(base)
    return {
        name: f"has {sizes[0]} rows for tokens, the base {own[0]}"
        for name, config in experts.items()
        if own and (sizes := vocab_sizes(config)) and sizes != own
    }
