"""Show texts that the experts and the merge answer differently, for the report of a project of texts."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from mergeflow import layout
from mergeflow.checkpoints.writer import write_atomically
from mergeflow.documents import Document, Number, read_document
from mergeflow.errors import MergeflowError
from tasks.project.recorded import digest
from tasks.project.stage import STATE
from tasks.report.files import RunFiles
from tasks.report.tables import Cell, Column, Row, Table

LOOKED_AT = 200  # validation examples of a task: a second for an encoder of a million parameters
SHOWN = 4  # of a task
PASSAGES, PASSAGES_SHOWN = 24, 3  # of causal models: two seconds for half a million parameters
LARGEST = 1 << 30  # bytes of weights: a page is written on the processor, where a larger model is asked for minutes
OF_TEXTS = ("text", "causal")
UNLEARNED_TEXTS = f"{STATE}/unlearned_texts.json"  # written by `mergeflow unlearn`


@with_config(ConfigDict(extra="forbid"))
class Changed(TypedDict):
    """An example of validation with three answers: the right one, the expert's and the merge's."""

    task: str
    text: str
    text_pair: str | None
    right: str
    expert: str
    merge: str


def texts_table(root: Path, run: RunFiles) -> Table | None:
    """Return the texts on which expert and merge differ.

    None where the project has other examples, lacks files, or has a model of more than 1 GiB. The first 200 validation
    examples of each task, or 24 passages, are answered once for the same models, heads and texts, and kept in
    `.mergeflow`.
    """
    winner, tasks = run.selection["winner"], list(run.selection["tasks"])
    modality = run.params.get("model", {}).get("modality")
    if modality not in OF_TEXTS:
        return None
    weights, others = _weights(root, winner, tasks), _heads_and_texts(root, tasks, modality)
    if not all(map(Path.exists, (*weights, *others))):
        return None
    if (root / layout.BASE_MODEL).stat().st_size > LARGEST:
        return None
    cache = root / STATE / "report_texts.json"
    made_of = {"merge": run.selection["methods"][winner]["fingerprint"]}  # of these experts and no others
    made_of |= {str(path.relative_to(root)): digest(path) for path in others}
    record = _read_kept(cache, _Answered)
    if record.get("made_of") != made_of:
        if modality == "causal":
            changed = changed_passages(root, winner, tasks)
        else:
            changed = [text for task in tasks for text in _changed(root, winner, task)]
        record = {"made_of": made_of, "texts": changed}
        write_atomically(cache, json.dumps(record, ensure_ascii=False))
    return _table(record["texts"])


def unlearned_table(root: Path, run: RunFiles) -> Table | None:
    """Return how the newest version that has unlearned a task of texts goes on, beside the version it was made of."""
    record = _read_kept(root / UNLEARNED_TEXTS, _Unlearned)
    if run.registration is None or not record or record["model"] != run.registration["model"]:
        return None
    caption = (
        f"How version {record['version']}, which has unlearned {record['task']} (λ = {record['weight']:g}), goes on "
        f"from held-out passages; compared with version {record['parent']}, of which it was made"
    )
    titles = ("task", "text", "its own next words", "before", "after")
    rows = _rows(record["texts"], ("task", "text", "right", "before", "after"))
    return Table(caption, [Column(title, numeric=False) for title in titles], rows)


def _rows(texts: Sequence[Mapping[str, Any]], names: Iterable[str]) -> list[Row]:
    return [Row([Cell(text[name] or "", text[name] or "") for name in names]) for text in texts]


def keep_unlearned(root: Path, facts: Mapping[str, Any]) -> None:
    write_atomically(root / UNLEARNED_TEXTS, json.dumps(facts, indent=1) + "\n")


class _Answered(TypedDict):
    """What `report_texts.json` holds: the texts, and digests of what they were made of."""

    made_of: dict[str, str]
    texts: list[Changed]


class _Continued(TypedDict):
    task: str
    text: str
    right: str
    before: str
    after: str


class _Unlearned(TypedDict):
    """What `unlearned_texts.json` holds: a version, the task that it unlearned, and how it goes on."""

    model: str
    version: str | int
    parent: str | int
    task: str
    weight: Number
    texts: list[_Continued]


def _read_kept(path: Path, kind: type[Document]) -> Document | dict[str, Any]:
    """Read the texts that were written for reports; nothing where there is no such file, or one that cannot be read."""
    try:
        return read_document(path, kind)
    except (FileNotFoundError, MergeflowError):  # cut off by a kill, by a version that did not write it whole
        return {}


def _weights(root: Path, winner: str, tasks: list[str]) -> list[Path]:
    experts = [layout.expert_model(task) for task in tasks]
    return [root / path for path in (layout.BASE_MODEL, layout.merge(winner), *experts)]


def _heads_and_texts(root: Path, tasks: list[str], modality: str) -> list[Path]:
    heads = [layout.expert_head(task) for task in tasks] if modality == "text" else []
    texts = [f"{layout.split('validation', task)}/validation.parquet" for task in tasks]
    return [root / path for path in (*heads, *texts)]


def _changed(root: Path, winner: str, task: str) -> list[Changed]:
    """Return the examples of a task whose answer changed most: from right to wrong first, or by the largest number."""
    import pyarrow.parquet as pq
    import torch

    from mergeflow.checkpoints import open_checkpoint
    from mergeflow.modalities.classification import Regression
    from mergeflow.modalities.heads import read_head
    from mergeflow.modalities.text.modality import MODALITY
    from tasks.project.parameters import load_params

    with open_checkpoint(root / layout.BASE_MODEL) as base:
        model = MODALITY.build(load_params(root / "params.yaml").model, base.metadata)
    folder, cpu = root / layout.split("validation", task), torch.device("cpu")
    examples: Any = MODALITY.open(task, folder, "validation", read_head(root / layout.expert_head(task)), cpu)
    rows = torch.arange(min(LOOKED_AT, len(examples)))
    numbers = isinstance(examples, Regression)
    checkpoints = [root / layout.expert_model(task), root / layout.merge(winner)]
    expert, merge = (_answered(model, checkpoint, examples, rows) for checkpoint in checkpoints)
    table = pq.read_table(folder / "validation.parquet", columns=["text", "text_pair", "label"]).slice(0, len(rows))
    cells, names = table.to_pylist(), () if numbers else examples.head.class_names
    right = torch.tensor([cell["label"] for cell in cells])
    if numbers:
        weight = (merge - expert).abs()
    else:  # 2 where the right answer was lost, 1 where one wrong answer took another's place, .5 where it was found
        weight = (merge != expert) * (1.0 + (expert == right).float() - 0.5 * (merge == right).float())
    order = [int(row) for row in weight.argsort(descending=True, stable=True)[:SHOWN] if weight[row] > 0]

    def label(value: Any) -> str:
        return f"{float(value):.2f}" if numbers else str(names[int(value)])

    return [
        Changed(
            task=task,
            text=cells[row]["text"],
            text_pair=cells[row]["text_pair"],
            right=label(right[row]),
            expert=label(expert[row]),
            merge=label(merge[row]),
        )
        for row in order
    ]


def _answered(model: Any, checkpoint: Path, examples: Any, rows: Any) -> Any:
    """Return a checkpoint's answers to some examples: numbers, or indices of classes; int64 or float32 [rows]."""
    import torch

    from mergeflow.checkpoints import open_checkpoint
    from mergeflow.modalities.classification import Regression

    with torch.inference_mode():
        with open_checkpoint(checkpoint) as state:
            model.load(state)
        if isinstance(examples, Regression):
            return examples.answers(model, rows)
        return examples.logits(model, rows).argmax(dim=1)


def _table(texts: list[Changed]) -> Table:
    titles = {"task": "task", "text": "text", "text_pair": "second text", "right": "right"}
    if not any(text["text_pair"] for text in texts):
        del titles["text_pair"]
    titles |= {"expert": "expert", "merge": "merge"}
    caption = "Answers that changed between expert and merge, of the first validation texts of each task"
    return Table(caption, [Column(title, numeric=False) for title in titles.values()], _rows(texts, titles))


class _Answer(NamedTuple):
    text: str
    right: str
    answer: str
    score: int


def changed_passages(root: Path, winner: str, tasks: Sequence[str]) -> list[Changed]:
    """Return where expert and merge write other texts: of each task those where the merge lost most words."""
    from mergeflow.modalities.causal.model import open_language

    opened = open_language(layout.BASE_MODEL, root)
    changed: list[Changed] = []
    for task in tasks:
        answers = []
        for checkpoint in (layout.expert_model(task), layout.merge(winner)):
            opened.load(root / checkpoint)
            answers.append(_answers(opened, root / layout.split("validation", task), task))
        pairs = [(expert, merge) for expert, merge in zip(*answers, strict=True) if expert.answer != merge.answer]
        pairs.sort(key=lambda pair: pair[1].score - pair[0].score)
        changed += [
            Changed(
                task=task,
                text=expert.text,
                text_pair=None,
                right=expert.right,
                expert=expert.answer,
                merge=merge.answer,
            )
            for expert, merge in pairs[:PASSAGES_SHOWN]
        ]
    return changed


def _answers(opened: Any, folder: Path, task: str) -> list[_Answer]:
    import pyarrow.parquet as pq
    import torch

    from mergeflow.modalities.causal.generation import go_on, held_out
    from mergeflow.modalities.causal.modality import Questions, open_examples

    if passages := held_out(folder, PASSAGES):
        continued = go_on(opened.model.module, opened.tokenizer, passages)
        return [_Answer(passage.prompt, passage.reference, passage.written, passage.right) for passage in continued]
    examples = open_examples(task, folder, "validation", None, torch.device("cpu"))
    assert isinstance(examples, Questions)
    rows = torch.arange(min(PASSAGES, len(examples)))
    with torch.inference_mode():
        chosen = examples.likelihoods(opened.model, rows).argmax(dim=1).tolist()
    cells = pq.read_table(folder / "validation.parquet").slice(0, len(rows)).to_pylist()
    return [
        _Answer(cell["text"], cell["choices"][cell["answer"]], cell["choices"][choice], int(choice == cell["answer"]))
        for cell, choice in zip(cells, chosen, strict=True)
    ]
