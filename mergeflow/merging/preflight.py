"""Model folders compared before a merge: settings, tokens, templates, licences, bases."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from filecmp import cmp
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mergeflow.checkpoints.align_names import Fitted
from mergeflow.checkpoints.checks import same_values
from mergeflow.checkpoints.folders import NamedBase, code_files, config_of, folder_of, named_base, named_folders
from mergeflow.checkpoints.formats import cached_id, open_checkpoint, other_weights, read_json_if_whole
from mergeflow.checkpoints.reader import FileEntry, LazyStateDict, TensorEntry
from mergeflow.errors import MergeflowError
from mergeflow.late import torch
from mergeflow.merging.architectures.architecture import Config
from mergeflow.merging.architectures.blocks import comparable, flattened, harmless, vocab_sizes
from mergeflow.merging.method import RUNNING
from mergeflow.merging.vocabulary.companions import (
    SETTINGS,
    TOKENIZER,
    Vocabulary,
    cut_otherwise,
    listed_tokens,
    marked,
    marked_in_settings,
    read_vocabulary,
    special_settings,
    templates_of,
    tokenizer_files,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Finding:
    """A difference between the base and experts, refused where it changes what weights mean.

    The subject is `rope_theta`, `tokenizer`: a recipe's `allow` speaks of it.
    """

    subject: str
    text: str
    refused: bool = False


def difference(subject: str, base: Any, others: Mapping[str, Any], refused: bool = False, way_out: str = "") -> Finding:
    """Report that experts have other values than the base, experts of one value together."""
    groups: dict[str, list[str]] = {}
    for name, value in others.items():
        groups.setdefault(_short(value), []).append(f"'{name}'")
    listed = "; ".join(f"{', '.join(names)} {value}" for value, names in groups.items())
    return Finding(subject, f"{subject}: base {_short(base)}; {listed}{way_out}", refused)


@dataclass(frozen=True)
class Default:
    """The default, from the model's class, of a setting that config.json leaves out."""

    value: Any
    cls: str


def _short(value: Any) -> str:
    if isinstance(value, Default):
        return f"{_short(value.value)} (left out, {value.cls}'s default)"
    text = repr(value) if isinstance(value, str) else "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def running_findings(names: Iterable[str]) -> list[Finding]:
    """Report statistics of BatchNorm among the tensors to be merged."""
    statistics = sorted(name for name in names if name.endswith(RUNNING))
    if not statistics:
        return []
    message = (
        f"{len(statistics)} tensors such as '{statistics[0]}' are merged like weights, but are not the merged model's"
    )
    return [Finding("batch_norm", f"batch_norm: {message}: compute them again from data before you use it")]


def counter_findings(base: LazyStateDict, experts: Mapping[str, LazyStateDict]) -> list[Finding]:
    """Report single integers and truth values that differ; those of BatchNorm count batches and mean nothing."""
    single = [
        name
        for name, info in base.infos.items()
        if info.numel == 1 and not (info.dtype.is_floating_point or info.dtype.is_complex)
        if isinstance(base.entries[name], FileEntry | TensorEntry) and not name.endswith("num_batches_tracked")
    ]
    unlike = {
        name: expert
        for expert, state in experts.items()
        for name in single
        if name in state and not torch.equal(base[name], state[name])
    }
    if not unlike:
        return []
    (name, expert), more = next(iter(unlike.items())), len(unlike) - 1
    differ = f"and {more} more differ" if more else "differs"
    return [Finding("integers", f"integers: '{name}' of '{expert}' {differ} from the base's, which the result has")]


def check_findings(findings: Iterable[Finding], allow: Iterable[str]) -> None:
    """Refuse differences that change the meaning of weights, but those whose subjects the recipe's patterns allow."""
    patterns = tuple(allow)
    faults = [finding for finding in findings if finding.refused and not allowed(finding, patterns)]
    if not faults:
        return
    shown = "\n".join(f"  - {finding.text}" for finding in faults)
    subjects = ", ".join(dict.fromkeys(finding.subject for finding in faults))
    raise MergeflowError(
        f"the models differ in what their weights mean:\n{shown}\n"
        f"Merge fine-tuned copies of one base, or accept it and keep the base's: `allow: [{subjects}]`."
    )


def allowed(finding: Finding, patterns: Iterable[str]) -> bool:
    """Whether a recipe accepts a difference, by its name or the last part of it."""
    return any(
        fnmatchcase(name, pattern) for pattern in patterns for name in (finding.subject, finding.subject.split(".")[-1])
    )


_TOKEN_ID = re.compile(r"\w+_tokens?_(?:ids?|index)")
# The same weights compute something else.
_MEANING = re.compile(
    r"model_type|_class_name|architecture|rope_(?:theta|scaling|parameters)\b.*|\w*rotary\w*|rope_interleave|axes_dims_rope"
    r"|no_rope\w*|position_embedding_type|alibi|relative_attention\w*|layer_types|attn_type|is_decoder|(?:is_)?causal"
    r"|\w*bidirectional\w*|use_sliding_window|sliding_window\w*|window_size|local_attention|attention_chunk_size"
    r"|hidden_act\w*|\w+_act(?:_fn)?|act_(?:fn|layer)|activation\w*|\w+_activation\w*|feed_forward_proj|quick_gelu"
    r"|\w*attention_heads|num_key_value_heads|n_heads?|num_heads|num_kv_heads|head_dim|attention_head_dim|d_kv"
    r"|qk_\w+_head_dim|multi_query|new_decoder_architecture|use_parallel_residual|parallel_attn|global_pool"
    r"|num_experts_per_tok(?:en)?|moe_(?:top_?)?k|norm_topk_prob|moe_normalize_expert_weights|scoring_func|topk_\w+|n_group"
    r"|route\w*_scal\w+|softmax_scale|\w*softcapping|query_pre_attn_scalar|\w+_multiplier|logits?_scaling|logit_scale"
    r"|\w*layer_norm_before|\w*normalize_before|\w*post_layernorm|do_stable_layer_norm|pre_norm"
    r"|scale_\w+|clip_qkv|id2label|label_names|norm_num_groups|flip_sin_to_cos|freq_shift|resnet_time_scale_shift"
)
# Models whose positions are counted from the id of the padding on.
_PADDED = re.compile(
    r"(?:xlm-)?roberta.*|camembert|xmod|data2vec-text|esm|ibert|longformer|luke|layoutlmv3|lilt|markuplm|mpnet|altclip_text"
    r"\w*|bridgetower_text\w*|clap_text\w*|kosmos-2.*|fsmt|m2m_100|nllb-moe|seamless_m4t\w*|speech_to_text|trocr|xglm"
)
_TIMM = "model_args."  # arguments of its classes, whose defaults are not in the file
_OF_LABELS = ("id2label", "label2id", "problem_type")  # they say what a head's outputs are called
_LABELS = re.compile(
    r"(?:^|\.)(?:\w*classifier|\w*class_(?:embed|predictor)|score|enc_score_head|classification_head|qa_outputs|logits_proj"
    r"|sequence_summary|decoder\.final_layer)\b|^(?:head|dist_head|fc|objective)\."
)


def config_findings(base: Config, experts: Mapping[str, Config], tensors: Mapping[str, Any]) -> list[Finding]:
    """Compare the experts' settings with the base's; a setting that config.json leaves out has its class's default."""
    experts = {name: config for name, config in experts.items() if config}
    if not base or not experts:
        return []
    labelled = any(_LABELS.search(name) for name in tensors)

    names = {"": base, **experts}  # no expert has an empty name
    named_alike = all(config.get("id2label") == base.get("id2label") for config in experts.values())
    given = {name: flattened(config) for name, config in names.items()}

    def places(key: str) -> bool:
        kind = given[""].get(f"{key.removesuffix('pad_token_id')}model_type")
        return _last(key) == "pad_token_id" and bool(_PADDED.fullmatch(str(kind)))

    def counts(key: str) -> bool:
        return not harmless(key) and (labelled or _last(key) not in _OF_LABELS) and (named_alike or key != "label2id")

    settings, classes = comparable(names, counts)
    base_settings = settings.pop("")
    findings = []
    alone = set()
    for key in sorted({key for config in settings.values() for key in config} | base_settings.keys()):
        if not counts(key):
            continue
        meaning = places(key) or bool(_MEANING.fullmatch(_last(key)))
        unlike = {
            name: Default(config[key], classes.get(name, "")) if key not in given[name] else config[key]
            for name, config in settings.items()
            if key in config and key in base_settings and config[key] != base_settings[key]
        }
        if unlike:
            mine = Default(base_settings[key], classes.get("", "")) if key not in given[""] else base_settings[key]
            findings.append(difference(key, mine, unlike, meaning))
        elif (meaning or key.startswith(_TIMM)) and not classes:
            findings += _not_compared(key, base_settings, settings)
        elif any(key not in config for config in (base_settings, *settings.values())):
            alone.add(key)
    return findings + _alone(alone, {"the base": base_settings, **settings})


def _alone(keys: Iterable[str], settings: Mapping[str, Config]) -> list[Finding]:
    """Tell in a line of the settings that some config.json leave out, whose class gives them no default."""
    owners: dict[str, list[str]] = {}
    for key in sorted(keys):
        names = [name if name == "the base" else f"'{name}'" for name, config in settings.items() if key in config]
        owners.setdefault(", ".join(names), []).append(key)
    return [
        Finding("settings", f"settings: only config.json of {names} says {_few(keys)}: not compared, no default here")
        for names, keys in owners.items()
    ]


def _few(keys: list[str]) -> str:
    return f"{', '.join(keys[:3])}{', …' * (len(keys) > 3)}"


def _not_compared(key: str, base: Config, experts: Mapping[str, Config]) -> list[Finding]:
    """Return that a setting is left out in some config.json, and that nothing here knows the default."""
    values = {"base": base.get(key), **{f"'{name}'": config.get(key) for name, config in experts.items()}}
    out = [name for name, config in (("base", base), *((f"'{n}'", c) for n, c in experts.items())) if key not in config]
    written = {name: value for name, value in values.items() if value not in (None, "default")}
    if not out or not written:
        return []
    values_found = "; ".join(f"{name} {value!r:.60}" for name, value in written.items())
    reason = (
        "no transformers here that knows the default" if base.get("model_type") else "config.json has no model_type"
    )
    return [Finding(key, f"{key}: {values_found}; {', '.join(out)} leaves it out: not compared, {reason}")]


def _last(key: str) -> str:
    return key if key.startswith("rope_") else key.split(".")[-1]


Folders = Mapping[str, Path | None]
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_findings(base: Path | None, experts: Folders, resized: Mapping[str, str]) -> list[Finding]:
    """Compare the experts' tokens with the base's, where nothing aligns them.

    Args:
        resized: Experts whose tables have another number of rows, with the words for it.
    """
    findings = [
        Finding(
            "tokenizer",
            f"tokenizer: '{name}' {words}; `tokenizer_source: union` (or base, or {name}) aligns them",
            True,
        )
        for name, words in resized.items()
    ]
    base_text = _content(base)
    for name, folder in experts.items():
        text = _content(folder)
        if not (base_text and text):
            findings += _slowly_compared(name, base, folder)
        elif (text, marked_in_settings(folder)) != (base_text, marked_in_settings(base)):
            mine, theirs = (read_vocabulary(each, name, str(each)) for each in (base, folder))
            findings += _compared(name, mine, theirs)
    return findings


def _slowly_compared(name: str, base: Path | None, other: Path | None) -> list[Finding]:
    """Compare tokenizers of which one has no tokenizer.json: by the tokens that are listed, the rest by bytes."""
    if base is None or other is None:
        return []
    (mine, whole), (theirs, theirs_whole) = listed_tokens(base), listed_tokens(other)
    findings = _compared(name, mine, theirs, lists_all=(whole is None) == (theirs_whole is None))
    files, their_files = tokenizer_files(base), tokenizer_files(other)
    unlike = [file for file in files & their_files if not _same_file(base / file, other / file)]
    unlike = [file for file in sorted(unlike) if not (file == whole == theirs_whole)]
    if unlike:
        text = f"tokenizer: '{name}' has another {unlike[0]}, not compared; the result has the base's"
    elif files and their_files and not files & their_files and not (whole and theirs_whole):
        text = f"tokenizer: '{name}' has {min(their_files)}, the base {min(files)}: not compared"
    else:
        return findings
    return [*findings, Finding("tokenizer", text)]


def _content(folder: Path | None) -> bytes | None:
    path = folder / TOKENIZER if folder is not None else None
    return path.read_bytes() if path is not None and path.is_file() else None


def _compared(name: str, base: Vocabulary, other: Vocabulary, lists_all: bool = True) -> list[Finding]:
    """Compare one expert's tokenizer: rows of other tokens are refused, new tokens and other cuts are warned of.

    Args:
        lists_all: Whether both list all of their tokens, or both the added ones; else others may be there.
    """
    moved = [token for token, row in other.ids.items() if base.ids.get(token, row) != row]
    named = {row: token for token, row in base.ids.items()}
    taken = [token for token, row in other.ids.items() if token not in base.ids and row in named]
    new = [token for token in other.ids if token not in base.ids]
    if moved or taken:
        parts = [f"{_count(moved)} in other rows"] * bool(moved)
        parts += [f"{_count(taken, 'row')} of other tokens{_some(taken)}"] * bool(taken)
        way_out = f"`tokenizer_source: union` (or base, or {name}) aligns them"
        return [Finding("tokenizer", f"tokenizer: '{name}' has {' and '.join(parts)}; {way_out}", refused=True)]
    findings = []
    if new and lists_all:
        keeps = f"`tokenizer_source: union` (or {name}) keeps them"
        findings.append(Finding("tokenizer", f"tokenizer: '{name}' has {_count(new)} more{_some(new)}; {keeps}"))
    lacking = [token for token in base.ids if token not in other.ids]
    if lacking and lists_all:
        findings.append(Finding("tokenizer", f"tokenizer: '{name}' lacks {_count(lacking)}{_some(lacking)}"))
    if not base.content or not other.content:
        return findings
    if unlike := cut_otherwise(base, other):
        text = f"tokenizer: '{name}' cuts text with another {', '.join(unlike)}; the result has the base's"
        findings.append(Finding("tokenizer", text))
    marks, others = marked(base), marked(other)
    changed = [
        token
        for token in marks | others
        if (token in base.ids) == (token in other.ids) and marks.get(token) != others.get(token)
    ]
    if changed:
        findings.append(
            Finding("tokenizer", f"added tokens: '{name}' marks {len(changed)} differently{_some(changed)}")
        )
    return findings


def _count(things: list[str], word: str = "token") -> str:
    return f"{len(things)} {word}{'s' * (len(things) > 1)}"


def _some(tokens: list[str]) -> str:
    return f" ({', '.join(repr(token) for token in tokens[:3])}{', …' * (len(tokens) > 3)})"


def special_findings(base: Path | None, experts: Folders) -> list[Finding]:
    """List the special tokens of experts that differ from the base's."""
    base_tokens, others = _special(base), {name: _special(folder) for name, folder in experts.items()}
    findings = []
    for key in _SPECIAL:
        unlike = {
            name: given.get(key)
            for name, given in others.items()
            if given and base_tokens and given.get(key) != base_tokens.get(key)
        }
        if unlike:
            way_out = f"; `tokenizer_source: {next(iter(unlike))}` takes an expert's"
            findings.append(difference(key, base_tokens.get(key), unlike, way_out=way_out))
    return findings


def _special(folder: Path | None) -> dict[str, Any]:
    given = special_settings(folder)
    return {key: value.get("content") if isinstance(value := given[key], dict) else value for key in given}


def template_findings(base: Path | None, experts: Folders) -> list[Finding]:
    """List the experts with another chat template than the base's."""
    base_templates = templates_of(base)
    unlike = [
        name for name, folder in experts.items() if (templates := templates_of(folder)) and templates != base_templates
    ]
    if not unlike:
        return []
    listed = ", ".join(f"'{name}'" for name in unlike)
    have = "have" if len(unlike) > 1 else "has"
    words = f"{listed} {have} another than the base" if base_templates else f"{listed} {have} one, the base has none"
    return [Finding("chat_template", f"chat_template: {words}; `chat_template: {unlike[0]}` (or auto) chooses one")]


_FILES = ("LICENSE*", "LICENCE*", "COPYING*")
_BESIDE = ("NOTICE*", "USE_POLICY*")
_TEXT = "text"  # digest of a licence file, which no card names


def licence_files(folders: Mapping[str, Path | None], holder: str | None) -> dict[str, bytes]:
    """Return the licence files of a merged model's folder: those of all its inputs, each text once.

    Args:
        holder: The input whose licence the result has; its files keep their names, others are `LICENSE-chat.txt`.
    """
    files: dict[str, bytes] = {}
    for name in sorted(folders, key=lambda name: name != holder):
        folder = folders[name]
        for path in licence_paths(folder) if folder is not None else ():
            content = path.read_bytes()
            if content not in files.values():
                plain = re.sub(r"[^\w.-]+", "-", name)
                file = path.name if name == holder else f"{path.stem}-{plain}{path.suffix}"
                files[file] = content
    return files


def licence_paths(folder: Path) -> list[Path]:
    """Return the licence files of a folder, with notices and policies of use."""
    return _held(folder, (*_FILES, *_BESIDE))


def _held(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]


# Licences that ask for no more than notices; what they cover may be part of something under other terms.
_FREE = (
    *("apache-2.0", "mit", "bsd", "bsd-2-clause", "bsd-3-clause", "isc", "cc0-1.0", "unlicense", "zlib", "cc-by-4.0"),
    "pddl",
)
_LINKS = ("license_name", "license_link")


def front_matter(folder: Path | None) -> dict[str, Any]:
    """Return the front matter of a folder's README.md; {} where there is none."""
    path = folder / "README.md" if folder is not None else None
    if path is None or not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8", errors="replace").lstrip("\ufeff")
    if not text.startswith("---"):
        return {}
    try:
        values = yaml.safe_load(text[3:].split("\n---", 1)[0])
    except (yaml.YAMLError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def licence_of(folder: Path | None) -> dict[str, str]:
    """Return `license`, and its name and link where it is `other`, by the card or a licence file; {} without any."""
    given = front_matter(folder)
    licence = given.get("license")
    if isinstance(licence, list):
        licence = licence[0] if licence else None
    if not isinstance(licence, str):
        if folder is None or not (files := _held(folder, _FILES)):
            return {}
        digest = hashlib.sha256(files[0].read_bytes()).hexdigest()  # other texts are other terms
        return {"license": "other", "license_name": f"see {files[0].name}", _TEXT: digest}
    return {"license": licence.lower(), **{key: str(given[key]) for key in _LINKS if given.get(key)}}


def merged_licence(licences: Mapping[str, Mapping[str, str]]) -> tuple[dict[str, str], str | None]:
    """Find the licence that a merge can have, with remarks.

    All equal: that one. One with terms of its own among free ones: that one. Several with terms of their own, which
    need not agree: none.
    """
    given = {name: dict(licence) for name, licence in licences.items() if licence}
    silent = [f"'{name}'" for name in licences if name not in given]
    if not given:
        return {}, None
    kinds: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, licence in given.items():
        kinds.setdefault(tuple(sorted(licence.items())), []).append(f"'{name}'")
    listed = "; ".join(f"{', '.join(names)} {_word(dict(kind))}" for kind, names in kinds.items())
    bound = [dict(kind) for kind in kinds if dict(kind)["license"] not in _FREE]
    unknown = f"licence: {', '.join(silent)} name{'s' * (len(silent) == 1)} none" if silent else None
    if len(kinds) == 1:
        return _without_text(next(iter(given.values()))), unknown
    if len(bound) > 1:
        return {}, f"licences conflict: {listed}: read their terms before the result is given away"
    licence = (
        bound[0] if bound else max((dict(kind) for kind in kinds), key=lambda kind: kind["license"] == "apache-2.0")
    )
    return _without_text(licence), f"licences differ: {listed}; the result's card says {_word(licence)}"


def _without_text(licence: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in licence.items() if key != _TEXT}


def _word(licence: Mapping[str, str]) -> str:
    return licence.get("license_name", licence["license"])


SUBJECT = "base_model"
# How much of how many tensors is compared: fine-tuning moves nearly every tensor, and files may be hundreds of GB.
_TENSORS, _ELEMENTS = 16, 4096


def adapter_findings(base: LazyStateDict, experts: Mapping[str, LazyStateDict]) -> list[Finding]:
    """List the adapters that were made for another base than this one.

    One whose base is on this machine is refused where some of its weights differ from this base's; where they cannot be
    compared, and the names differ, that is a warning.
    """
    named = {name: named_base(state.path) for name, state in experts.items() if state.is_task_vector}
    return [
        finding for name, wanted in named.items() if wanted is not None and (finding := _finding(name, wanted, base))
    ]


def _finding(adapter: str, wanted: NamedBase, base: LazyStateDict) -> Finding | None:
    folder, base_name = wanted.folder(), cached_id(base.path) or base.path
    place = Path(base.path)
    if folder is not None and folder.resolve() in (place.resolve(), place.parent.resolve()):
        return None
    same = None if folder is None else _same_weights(base, folder)
    if same or (same is None and Path(wanted.name).name.lower() == Path(base_name).name.lower()):
        return None
    text = f"{SUBJECT}: '{adapter}' was made for '{wanted.path}' (adapter_config.json), the base is '{base_name}'"
    reason = "whose weights are others" if same is False else "which cannot be compared with it here"
    return Finding(SUBJECT, f"{text}, {reason}", refused=same is False)


def _same_weights(base: LazyStateDict, folder: Path) -> bool | None:
    """Whether two models hold the same numbers where a sample of them is compared; None where that cannot be told."""
    try:
        with open_checkpoint(folder) as other:
            shared = [name for name in sorted(base) if name in other and _comparable(base, other, name)]
            chosen = shared[:: max(1, len(shared) // _TENSORS)]
            counts = {name: min(_ELEMENTS, base.infos[name].numel) for name in chosen}
            equal = [_equal(base.read(n, 0, count), other.read(n, 0, count)) for n, count in counts.items()]
    except MergeflowError:
        return None
    return all(equal) if equal else None


def _comparable(base: LazyStateDict, other: LazyStateDict, name: str) -> bool:
    info, other_info = base.infos[name], other.infos[name]
    half = {str(info.dtype), str(other_info.dtype)} >= {"torch.float16", "torch.bfloat16"}
    return (
        info.shape == other_info.shape
        and info.dtype.is_floating_point
        and other_info.dtype.is_floating_point
        and not half
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether the numbers are the same in the narrower of the two types."""
    narrow = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    return same_values(a.to(narrow), b.to(narrow))


Remark = Callable[[Sequence[str], Sequence[str]], None]
"""Told what was done to make inputs fit, and what to know of them."""


def warnings_of(opened: Iterable[LazyStateDict], fit: Fitted) -> list[str]:
    """List the findings of models that are read where nothing is refused: files, settings, tokens, licences."""
    findings = (
        *compare(fit.base, fit.experts),
        *adapter_findings(fit.base, fit.experts),
        *counter_findings(fit.base, fit.experts),
    )
    return [*(note for state in opened for note in state.notes), *(finding.text for finding in findings)]


def compare(
    base: LazyStateDict, experts: Mapping[str, LazyStateDict], tokenizer: str | None = None, *, templated: bool = False
) -> list[Finding]:
    """Compare the experts' folders with the base's; a single file has nothing to compare.

    Args:
        tokenizer: Whose tokens the result has, where the recipe says it and they are aligned.
        templated: Whether the recipe says which chat template.
    """
    base_folder, config = folder_of(base), config_of(base)
    folders = {name: folder_of(state) for name, state in experts.items()}
    configs = {name: config_of(state) for name, state in experts.items()}
    findings = config_findings(config, configs, base.infos)
    preprocessing = preprocessing_findings(base_folder, folders)
    # Ids of tokens go with the tokens where these are aligned, and need no second line of generation_config.json.
    ids = [finding for finding in findings if not finding.refused and _TOKEN_ID.fullmatch(_last(finding.subject))]
    both = {finding.subject.removeprefix("generation.") for finding in preprocessing}
    findings = [finding for finding in findings if finding not in ids or not (tokenizer or finding.subject in both)]
    if tokenizer in experts:
        of_tokens = re.compile(rf"(?:.*\.)?{_TOKEN_ID.pattern}|tokenizer\b.*")
        preprocessing = [each for each in preprocessing if not of_tokens.fullmatch(each.subject)]
    for file, defaults in _OTHER_CONFIGS.items():
        given = {name: _with_defaults(_settings(folder, file), defaults) for name, folder in folders.items()}
        findings += config_findings(_with_defaults(_settings(base_folder, file), defaults), given, base.infos)
    if tokenizer is None:
        findings += tokenizer_findings(base_folder, folders, resized(config, configs))
    if tokenizer not in experts:
        findings += special_findings(base_folder, folders)
        findings += [] if templated else template_findings(base_folder, folders)
    _, message = merged_licence(
        {"base": licence_of(base_folder), **{name: licence_of(folder) for name, folder in folders.items()}}
    )
    findings += [Finding("licence", message)] if message else []
    findings += preprocessing
    findings += [finding for name, folder in folders.items() for finding in _other_files(name, base_folder, folder)]
    return [*findings, *_unread({"base": base_folder, **folders})]


# Configurations of other libraries, with what they mean where they are silent.
_OTHER_CONFIGS: dict[str, dict[str, Any]] = {"open_clip_config.json": {"quick_gelu": False}, "params.json": {}}


def _with_defaults(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    model = settings.get("model_cfg")
    return {**settings, "model_cfg": {**defaults, **model}} if isinstance(model, dict) else dict(settings)


# Files that the result has from the base, and what findings call them.
_COMPANIONS = {
    **dict.fromkeys(("preprocessor_config.json", "video_preprocessor_config.json"), "preprocessing"),
    "processor_config.json": "preprocessing",
    # Longest text, prompts.
    **{
        f"sentence_{kind}_config.json": "preprocessing"
        for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
    },
    "config_sentence_transformers.json": "preprocessing",
    "tokenizer_config.json": "tokenizer",
    "generation_config.json": "generation",  # what ends an answer
}
# Names and versions; of a tokenizer what its tokens and templates, compared by themselves, say too.
_NAMES = re.compile(
    r"(?:.*\.)?(?:processor_class|\w+_version|auto_map.*|_?name_or_path|_\w+|output_attentions)|__version__\..*"
)
_OF_TOKENS = re.compile(
    rf"(?:{'|'.join(_SPECIAL)}|(?:additional|extra)_special_tokens|added_tokens_decoder|chat_template)(?:\..*)?"
    r"|tokenizer_file|special_tokens_map_file|backend|is_local|tokenizer_class"
)
_PROCESSOR = re.compile(r"(?:FeatureExtractor|(?:Image|Video)Processor)(?:Fast|Pil)?$")


def _companion(folder: Path | None, file: str) -> dict[str, Any]:
    """Return the settings of a file by dotted names; a processor's class under one, without the version's ending."""
    settings: dict[str, Any] = {}
    for key, value in flattened(_settings(folder, file)).items():
        if isinstance(value, str) and _PROCESSOR.search(value) and key.endswith("_type"):
            start = key.removesuffix(key.split(".")[-1])
            settings[f"{start}type"] = _PROCESSOR.sub("", value)
        elif value is not None and not (_NAMES.fullmatch(key) or (file == SETTINGS and _OF_TOKENS.fullmatch(key))):
            settings[key] = value
    return settings


def preprocessing_findings(base: Path | None, experts: Folders) -> list[Finding]:
    """List the experts with another preprocessing than the base's (mean, size, sampling rate), or end of answers."""
    findings = []
    for file, subject in _COMPANIONS.items():
        settings = {name: _companion(folder, file) for name, folder in experts.items() if _settings(folder, file)}
        base_settings, source = _companion(base, file), file if _settings(base, file) else "config.json"
        if subject == "generation":  # transformers then takes what config.json says
            said = {*base_settings, *(key for given in settings.values() for key in given)}
            lacking = {name: _settings(folder, "config.json") for name, folder in experts.items()}
            settings = {name: _chosen(config, said) for name, config in lacking.items() if config} | settings
            base_settings = base_settings or _chosen(_settings(base, "config.json"), said)
        for key, value in base_settings.items():
            unlike = {name: given[key] for name, given in settings.items() if key in given and given[key] != value}
            if unlike:
                way_out = f"; the result has the base's {source}"
                findings.append(difference(f"{subject}.{key}", value, unlike, way_out=way_out))
        for name, given in settings.items():
            alone = [key for key in sorted(given.keys() ^ base_settings.keys()) if not harmless(key)]
            if alone:
                keys = _few(alone)
                text = f"{subject}: {file} of '{name}' and the base do not both say {keys}; the result has the base's"
                lone = f"{subject}: '{name}' has a {file} ({keys}), and the base and the result have none"
                findings.append(Finding(subject, text if _settings(base, file) else lone))
    return findings


def _chosen(config: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    inner = config.get("text_config")
    settings = {**(inner if isinstance(inner, dict) else {}), **config}
    return {key: settings[key] for key in keys if settings.get(key) is not None}


def _settings(folder: Path | None, file: str) -> dict[str, Any]:
    return {} if folder is None else read_json_if_whole(folder / file)


def _other_files(name: str, base: Path | None, expert: Path | None) -> Iterator[Finding]:
    """Tell of code, and of folders such as `2_Dense`, that an expert has too but with other content."""
    if base is None or expert is None:
        return
    mine, theirs = (_modules(folder) for folder in (base, expert))
    if theirs and mine != theirs:
        text = f"modules.json of '{name}' says {', '.join(theirs)}, the base's {', '.join(mine) or 'is missing'}"
        yield Finding("modules", f"modules: {text}; the result has the base's")
    groups = [
        ("modules", sorted(path.relative_to(base) for path in (base / module).rglob("*") if path.is_file()))
        for module in {*named_folders(base)} & {*named_folders(expert)}
    ]
    code = [Path(file) for file in code_files(base) if (base / file).is_file() and (expert / file).is_file()]
    for subject, files in (*groups, ("code", code)):
        if other := [file for file in files if not _same_file(base / file, expert / file)]:
            yield Finding(subject, f"{subject}: '{name}' has another '{other[0]}'; the result has the base's")


def _modules(folder: Path) -> list[str]:
    """Return the steps that modules.json of sentence-transformers says, such as Transformer, Pooling, Normalize."""
    steps: Any = []
    with suppress(OSError, ValueError, RecursionError):
        steps = json.loads((folder / "modules.json").read_bytes())
    steps = steps if isinstance(steps, list) else []
    return [str(step.get("type")).rpartition(".")[2] for step in steps if isinstance(step, dict)]


def _unread(folders: Folders) -> Iterator[Finding]:
    """Tell of files of weights next to the models."""
    owners: dict[str, list[str]] = {}
    for name, folder in folders.items():
        for file in other_weights(folder) if folder is not None and folder.is_dir() else ():
            owners.setdefault(file, []).append(f"'{name}'")
    for file, names in owners.items():
        text = f"'{file}' of {', '.join(names)} is no part of the model: its weights are not merged or copied"
        yield Finding("files", f"files: {text}")


def _same_file(a: Path, b: Path) -> bool:
    return b.is_file() and cmp(a, b, shallow=False)


def resized(base: Mapping[str, Any], experts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Say which experts have another number of rows for tokens."""
    base_sizes = vocab_sizes(base)
    return {
        name: f"has {sizes[0]} rows for tokens, the base {base_sizes[0]}"
        for name, config in experts.items()
        if base_sizes and (sizes := vocab_sizes(config)) and sizes != base_sizes
    }
