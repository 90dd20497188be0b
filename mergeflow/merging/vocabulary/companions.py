"""Tokenizers and chat templates of model folders: read, chosen, merged and written."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, PlainSerializer, TypeAdapter, ValidationError, model_validator

from mergeflow.checkpoints.formats import expanded, read_json, read_json_if_whole
from mergeflow.checkpoints.writer import write_text
from mergeflow.errors import MergeflowError
from mergeflow.schema import Frozen

BASE, UNION = "base", "union"


class Source(Frozen):
    """Where the embedding of a token comes from.

    Its own row in a model, the row of another token there, nothing, or the mean of all models that have the token.
    """

    kind: Literal["model", "model_token", "zero", "mean"] = "model"
    model: str | None = None  # `base` or an expert's name
    token: str | None = None  # the other token, for `model_token`
    token_id: Annotated[int, Field(ge=0)] | None = None  # its row, where that is easier to say

    @model_validator(mode="after")
    def _check(self) -> "Source":
        if (self.model is not None) != self.kind.startswith("model"):
            raise ValueError(f"a source of kind '{self.kind}' {'takes no' if self.model else 'needs a'} model")
        if ((self.token is None) == (self.token_id is None)) == (self.kind == "model_token"):
            raise ValueError("`token` or `token_id` says which row a source of kind 'model_token' is, and only there")
        return self


def _source(value: Any) -> Any:
    return {"kind": "model", "model": value} if isinstance(value, str) else value


class TokenChoice(Frozen):
    """What the embedding of one token is.

    It comes from a source in models that lack it; from the base, the only model, or the mean of several by default.
    """

    source: Annotated[Source | None, BeforeValidator(_source)] = None
    force: bool = False  # whether all models take it from there, those that have the token too
    new: bool = False  # whether the token is added where the vocabulary lacks it; else it is taken for a slip


def _named(value: Any) -> Any:
    return tuple(sorted(value.items())) if isinstance(value, dict) else value


class TokenizerChoice(Frozen):
    """The vocabulary of a merge, what single tokens' embeddings are, and of what the number of rows is a multiple."""

    source: str = BASE  # or `union` (the base's tokens, then those that only experts have), or an expert's name
    tokens: Annotated[tuple[tuple[str, TokenChoice], ...], BeforeValidator(_named), PlainSerializer(dict)] = ()
    pad_to_multiple_of: Annotated[int, Field(ge=1, le=2**20)] | None = None


def tokenizer_choice(value: Any) -> Any:
    """Return a recipe's `tokenizer`, which may be the name of its source alone."""
    return {"source": value} if isinstance(value, str) else value


TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
# What tokenizers of transformers that are not "fast" leave behind; tokenizer.json can be made of them.
SLOW = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "merges.txt")


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model."""

    folder: Path  # where its tokenizer lies
    content: Mapping[str, Any]  # tokenizer.json; {} where there is none
    ids: Mapping[str, int]  # row of each token, added tokens among them

    @property
    def kind(self) -> str:
        """The tokenizer's model: BPE, WordPiece, Unigram or WordLevel; older files do not say it."""
        model = self.content["model"]
        if model.get("type") or isinstance(model["vocab"], list):
            return str(model.get("type") or "Unigram")
        return "BPE" if "merges" in model else "WordPiece" if "max_input_chars_per_word" in model else "WordLevel"

    @property
    def rows(self) -> int:
        """The number of rows it needs at least."""
        return max(self.ids.values(), default=-1) + 1


_Row = Annotated[int, Field(strict=True, ge=0, lt=2**26)]  # a slip of more rows would take all memory
_Rows = dict[str, _Row]


class _Token(BaseModel):
    """What is read of an added token in tokenizer_config.json."""

    content: str


class _Added(_Token):
    """The same in tokenizer.json."""

    id: _Row


class _Model(BaseModel):
    """The model of tokenizer.json."""

    vocab: _Rows | list[tuple[str, Annotated[float, Field(strict=True)]]]
    merges: list[str | tuple[str, str]] = []


class _Content(BaseModel):
    """What is read of tokenizer.json."""

    model: _Model
    added_tokens: list[_Added] | None = None


def _check_tokens(kind: Any, content: Any, of_what: str) -> None:
    """Check that a file has tokens and their rows where these are read."""
    try:
        TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "all of it"
        raise MergeflowError(
            f"{of_what} holds no vocabulary of tokens with ids ({place}: {first['msg']}). Save the tokenizer again."
        ) from None


def read_vocabulary(folder: Path | None, owner: str, path: str) -> Vocabulary:
    """Read the tokenizer of a model's folder, None where the model is a file; `owner` is what the merge calls it."""
    if folder is None or not (folder / TOKENIZER).is_file():
        raise _none(folder, owner, path)
    content = read_json(folder / TOKENIZER)
    _check_tokens(_Content, content, f"'{folder / TOKENIZER}' of '{owner}'")
    vocab = content["model"]["vocab"]  # a mapping, or a list of pieces with scores
    ids = dict(vocab) if isinstance(vocab, dict) else {piece: row for row, (piece, _) in enumerate(vocab)}
    ids |= {token["content"]: token["id"] for token in added_tokens(content)}
    return Vocabulary(folder, content, ids)


def listed_tokens(folder: Path) -> tuple[Vocabulary, str | None]:
    """Return the tokens that files list as text, and the file that lists all of them; with None added ones alone."""
    if (folder / TOKENIZER).is_file():
        return read_vocabulary(folder, folder.name, str(folder)), TOKENIZER
    source = "vocab.txt" if (folder / "vocab.txt").is_file() else "vocab.json"
    if source == "vocab.txt":
        lines = (folder / source).read_text(encoding="utf-8", errors="replace").split("\n")
        ids: dict[str, Any] = {token.rstrip("\r"): row for row, token in enumerate(lines) if token}
    else:
        ids = read_json_if_whole(folder / source)
    listed = settings_of(folder).get("added_tokens_decoder")
    _check_tokens(dict[int, _Token] | None, listed, f"'{folder / SETTINGS}'")
    added = {token["content"]: int(row) for row, token in (listed or {}).items()}
    tokens = {**ids, **read_json_if_whole(folder / "added_tokens.json"), **added}
    _check_tokens(_Rows, tokens, f"'{folder}'")
    return Vocabulary(folder, {}, tokens), source if ids else None


def tokenizer_files(folder: Path) -> set[str]:
    """Return the files of a folder that hold the tokens of a tokenizer or how it cuts text, but for added tokens."""
    patterns = (TOKENIZER, "tekken.json", "vocab*.json", *_DERIVED)
    return {path.name for pattern in patterns for path in folder.glob(pattern)} - {"added_tokens.json"}


def added_tokens(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the added tokens, in order of their ids."""
    return sorted(content.get("added_tokens") or [], key=lambda token: int(token["id"]))


_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def cut_otherwise(base: Vocabulary, other: Vocabulary, *, aligned: bool = False) -> list[str]:
    """List why two tokenizers cut text otherwise: parts of tokenizer.json, and keys or scores of its model.

    Args:
        aligned: Whether rows are brought to each other, and new merges to the base's.
    """

    def plain(value: Any) -> Any:
        """Return a part as files of all versions would have it; None for what is off."""
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items() if not (aligned and key == "ids")}
        if not isinstance(value, list):
            return value or None
        kinds = [*map(type, value)]
        if aligned and kinds == [str, int]:
            return value[0]
        return " ".join(value) if kinds == [str, str] else [*map(plain, value)]

    models = base.content["model"], other.content["model"]
    pairs = [(part, base.content.get(part), other.content.get(part)) for part in _PARTS]
    pairs += [(key, models[0].get(key), models[1].get(key)) for key in models[0] | models[1]]
    skipped = {"type", "vocab"} | ({"unk_id"} if aligned else set())
    skipped |= {"merges"} if aligned and other.ids.keys() - base.ids.keys() else set()
    unlike = [key for key, mine, theirs in pairs if key not in skipped and plain(mine) != plain(theirs)]
    if isinstance(models[0]["vocab"], list) and isinstance(models[1]["vocab"], list):
        mine, theirs = (dict(map(tuple, model["vocab"])) for model in models)
        unlike += ["scores"] * any(mine[piece] != theirs[piece] for piece in mine.keys() & theirs)
    return unlike


_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")


def marked(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return how added and special tokens are cut out of text."""
    marks = {token["content"]: _flags(token) for token in added_tokens(vocabulary.content)}
    for token, flags in marked_in_settings(vocabulary.folder).items():
        marks[token] = {**marks.get(token, _flags({})), **flags}
    return marks


def marked_in_settings(folder: Path | None) -> dict[str, Any]:
    """Return how those are that files beside tokenizer.json add or mark."""
    settings, marks = special_settings(folder), {}
    for key in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder", ""):
        part = settings.get(key) if key else settings
        for token in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            if isinstance(token, dict) and isinstance(token.get("content"), str):
                marks[token["content"]] = _flags(token)
            elif key and isinstance(token, str):
                marks[token] = {"special": True}
    return marks


def _flags(token: Mapping[str, Any]) -> dict[str, bool]:
    return {flag: bool(token.get(flag, flag == "special")) for flag in _FLAGS}


def special_settings(folder: Path | None) -> dict[str, Any]:
    """Return tokenizer_config.json; without a list of tokens there, special_tokens_map.json of older versions wins."""
    path = folder / "special_tokens_map.json" if folder is not None else Path()
    settings, old = settings_of(folder), read_json_if_whole(path)
    return {**old, **settings} if "added_tokens_decoder" in settings else {**settings, **old}


def settings_of(folder: Path | None) -> dict[str, Any]:
    """Return tokenizer_config.json of a folder; {} where there is none."""
    return read_json(folder / SETTINGS) if folder is not None and (folder / SETTINGS).is_file() else {}


def _none(folder: Path | None, owner: str, path: str) -> MergeflowError:
    slow = next((name for name in SLOW if folder is not None and (folder / name).is_file()), None)
    if slow is not None:
        return MergeflowError(
            f"'{owner}' ({path}) has '{slow}' but no {TOKENIZER}, which tokens are aligned by: make one with "
            f"`AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})`."
        )
    where = "is a file outside a model folder" if folder is None else f"has no {TOKENIZER}"
    return MergeflowError(
        f"'{owner}' ({path}) {where}, which `tokenizer` aligns tokens by: give the model's folder with its tokenizer."
    )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a tokenizer, or settings of a model, as transformers writes its files."""
    write_text(path, json.dumps(dict(content), indent=2, ensure_ascii=False) + "\n")


_START = "{%- for turn in messages -%}"
_PROMPT = "{%- endfor -%}{%- if add_generation_prompt -%}"
_END = "{%- endif -%}"

CHATML = (
    f"{_START}{{{{- '<|im_start|>' ~ turn.role ~ '\\n' ~ turn.content ~ '<|im_end|>\\n' -}}}}"
    f"{_PROMPT}{{{{- '<|im_start|>assistant\\n' -}}}}{_END}"
)
LLAMA3 = (
    f"{{{{- bos_token -}}}}{_START}"
    "{{- '<|start_header_id|>' ~ turn.role ~ '<|end_header_id|>\\n\\n' ~ turn.content | trim ~ '<|eot_id|>' -}}"
    f"{_PROMPT}{{{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}}}{_END}"
)
# A system's words stand before the first question, since the format has no place of their own for them.
MISTRAL = (
    "{{- bos_token -}}{%- set said = namespace(first='') -%}"
    f"{_START}"
    "{%- if turn.role == 'system' -%}{%- set said.first = turn.content ~ '\\n\\n' -%}"
    "{%- elif turn.role == 'user' -%}{{- ' [INST] ' ~ said.first ~ turn.content ~ ' [/INST]' -}}"
    "{%- set said.first = '' -%}"
    "{%- else -%}{{- ' ' ~ turn.content ~ eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
)
ALPACA = (
    "{%- set titles = {'user': '### Instruction:\\n', 'assistant': '### Response:\\n', 'system': ''} -%}"
    f"{_START}{{{{- titles[turn.role] ~ turn.content | trim ~ '\\n\\n' -}}}}"
    f"{_PROMPT}{{{{- '### Response:\\n' -}}}}{_END}"
)
EXAONE = (
    "{%- if messages[0].role != 'system' -%}{{- '[|system|][|endofturn|]\\n' -}}{%- endif -%}"
    f"{_START}"
    "{{- '[|' ~ turn.role ~ '|]' ~ turn.content ~ ('' if turn.role == 'user' else '[|endofturn|]') ~ '\\n' -}}"
    f"{_PROMPT}{{{{- '[|assistant|]' -}}}}{_END}"
)

# Templates by the names that a recipe may give them.
NAMED = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "alpaca": ALPACA, "exaone": EXAONE}


FILE, MORE, KEY, DEFAULT = "chat_template.jinja", "additional_chat_templates", "chat_template", "default"
_PROCESSOR = "chat_template.json"
Templates = Mapping[str, str]  # by name; a model's only one is named `default`


def templates_of(folder: Path | None) -> dict[str, str]:
    """Return a folder's chat templates, from files of their own or, of older versions, from tokenizer_config.json."""
    if folder is None:
        return {}
    templates: dict[str, str] = {}
    processor = read_json(folder / _PROCESSOR) if (folder / _PROCESSOR).is_file() else {}
    for given in (settings_of(folder).get(KEY), processor.get(KEY)):
        templates |= _templates_in(given)
    files = {DEFAULT: folder / FILE, **{path.stem: path for path in sorted((folder / MORE).glob("*.jinja"))}}
    return templates | {name: _text(path) for name, path in files.items() if path.is_file()}


def _templates_in(given: Any) -> dict[str, str]:
    if isinstance(given, str):
        return {DEFAULT: given}
    listed = [template for template in given if isinstance(template, dict)] if isinstance(given, list) else []
    return {each["name"]: each["template"] for each in listed if {"name", "template"} <= each.keys()}


def chosen_templates(choice: str, folders: Mapping[str, Path | None]) -> dict[str, str]:
    """Return the chat templates that a recipe chooses, of models' folders by name, the base's first.

    It names `base`, an expert, `auto` (what most models have; of equally many the first), the path of a Jinja file, a
    template itself, or a format such as `chatml`.
    """
    templates_of_model = {name: templates_of(folder) for name, folder in folders.items()}
    if choice == "auto":
        counted = Counter(templates[DEFAULT] for templates in templates_of_model.values() if DEFAULT in templates)
        if not counted:
            raise MergeflowError("`chat_template: auto`: no model has a chat template. Remove it, or give a file.")
        most = counted.most_common(1)[0][0]
        return next(templates for templates in templates_of_model.values() if templates.get(DEFAULT) == most)
    if choice in templates_of_model:
        if not templates_of_model[choice]:
            having = ", ".join(f"'{name}'" for name, templates in templates_of_model.items() if templates) or "no model"
            raise MergeflowError(f"`chat_template: {choice}`: '{choice}' has no chat template; {having} has one.")
        return templates_of_model[choice]
    text = read_template(choice)
    text = NAMED.get(choice) if text is None else text
    if text is None:
        choices = ", ".join(("auto", *templates_of_model))
        raise MergeflowError(
            f"`chat_template: {choice}` is neither a model of the merge ({choices}), nor a file, nor a Jinja template, "
            f"nor a known format ({', '.join(NAMED)})."
        )
    return {DEFAULT: text}


def read_template(choice: str) -> str | None:
    """Return the text of a choice that is the path of a file, or a template itself; None where it is neither."""
    if "{{" in choice or "{%" in choice:
        return choice
    path = expanded(choice)
    return _text(path) if path.is_file() else None


def write_templates(templates: Templates, folder: Path) -> None:
    """Give a model folder these chat templates and no others."""
    settings = settings_of(folder)
    if settings.pop(KEY, None) is not None:
        write_json(folder / SETTINGS, settings)
    for path in (folder / FILE, folder / _PROCESSOR, *(folder / MORE).glob("*.jinja")):
        path.unlink(missing_ok=True)
    for name, text in templates.items():
        write_text(folder / FILE if name == DEFAULT else folder / MORE / f"{name}.jinja", text)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MergeflowError(f"cannot read the chat template '{path}': {error}.") from None


# What a tokenizer is stored in beside tokenizer.json: for its slow form, or by older versions of transformers.
_DERIVED = ("vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "*.model", "*.spm", "*.bpe", "*.tiktoken")
_OTHER = (TOKENIZER, SETTINGS, "special_tokens_map.json", "tekken.json", "chat_template.jin*")
_IDS = re.compile(r".*_(?:token|tokens)_(?:id|ids|index)$|(?:begin_)?suppress_tokens$")
_CONFIGS = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class TokenizerFiles:
    """What a merge writes for its vocabulary."""

    result: Vocabulary
    base: Vocabulary
    source: Vocabulary  # the vocabulary whose files are copied: the base's, or an expert's
    rows: tuple[int, int]  # rows of the merged vocabulary, and of the base's
    moved: frozenset[str] = frozenset()  # the tables whose rows are not those of the base's file

    def write(self, folder: Path) -> None:
        """Make the files of a folder, which has the base's, those of the merged vocabulary."""
        if self.source is not self.base:
            _replace(self.source.folder, folder)
        if self.result is not self.source:
            _extend(self.result, folder)
        new, old = self.rows
        tokens = {row: token for token, row in self.base.ids.items()}
        for name in _CONFIGS:
            path, theirs = folder / name, self.source.folder / name
            if not path.is_file():
                continue
            before = config = read_json(path)
            if self.source is not self.base:
                their_config = read_json(theirs) if theirs.is_file() else {}
                config = _with_ids(config, their_config, tokens, self.result.ids)
            config = _resized(config, old, new)
            if config != before:
                write_json(path, config)


def _files(folder: Path, *patterns: Sequence[str]) -> list[Path]:
    return [file for pattern in chain(*patterns) for file in sorted(folder.glob(pattern))]


def _replace(source: Path, folder: Path) -> None:
    """Take the base's tokenizer away and copy another model's."""
    for file in _files(folder, _DERIVED, _OTHER):
        file.unlink()
    shutil.rmtree(folder / MORE, ignore_errors=True)
    copy_tokenizer(source, folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a model's tokenizer, with its chat templates, to a folder without any."""
    for file in _files(source, _DERIVED, _OTHER):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    if (source / MORE).is_dir():
        shutil.copytree(source / MORE, folder / MORE)


def _extend(result: Vocabulary, folder: Path) -> None:
    """Write a new tokenizer.json; older forms of the tokenizer that would disagree with it are removed."""
    write_json(folder / TOKENIZER, result.content)
    for file in _files(folder, _DERIVED):
        file.unlink()
    settings = settings_of(folder)
    if isinstance(settings.get("added_tokens_decoder"), dict):
        added = {str(token["id"]): dict(token) for token in added_tokens(result.content)}
        new = {row: {key: value for key, value in token.items() if key != "id"} for row, token in added.items()}
        write_json(folder / SETTINGS, {**settings, "added_tokens_decoder": new})


_SIZES = ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input")


def _resized(config: Mapping[str, Any], old: int, new: int) -> dict[str, Any]:
    """Return a configuration with the new sizes of tables of tokens, in its parts too, wherever the old one stands."""
    return {
        key: _resized(value, old, new) if isinstance(value, dict) else new if key in _SIZES and value == old else value
        for key, value in config.items()
    }


def _with_ids(
    config: Mapping[str, Any], theirs: Mapping[str, Any], tokens: Mapping[int, str], ids: Mapping[str, int]
) -> dict[str, Any]:
    """Return a configuration with the ids of tokens that the tokenizer's model has, else the base's by their tokens."""

    def translated(value: Any) -> Any:
        if isinstance(value, list):
            return [new_id for inner in value if (new_id := translated(inner)) is not None]
        is_id = isinstance(value, int) and not isinstance(value, bool) and value in tokens
        return ids.get(tokens[value]) if is_id else value

    mapped: dict[str, Any] = {}
    for key in dict.fromkeys((*config, *(key for key in theirs if _IDS.match(key)))):
        value = config.get(key)
        if isinstance(value, dict):
            part = theirs.get(key)
            mapped[key] = _with_ids(value, part if isinstance(part, dict) else {}, tokens, ids)
        elif _IDS.match(key):
            mapped[key] = theirs[key] if key in theirs else translated(value)
        else:
            mapped[key] = value
    return mapped
