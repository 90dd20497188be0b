"""examples/studies/glue_roberta_base, by night: a dry run of RoBERTa's own architecture."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from mergeflow.modalities.text.preparation import GLUE
from studies.lab.rows import select
from studies.lab.study import read_rows
from tests.project_folder import run_pipeline
from tests.studies.small_lab import ROOT, run_study, train_run
from tests.studies.test_examples import project_of

EXAMPLE = ROOT / "examples/studies/glue_roberta_base"
# Columns and classes as the hub's nyu-mll/glue has them; None: numbers.
FORMAT: dict[str, tuple[tuple[str, ...], list[str] | None]] = {
    "cola": (("sentence",), ["unacceptable", "acceptable"]),
    "stsb": (("sentence1", "sentence2"), None),
    "rte": (("sentence1", "sentence2"), ["entailment", "not_entailment"]),
}
WORDS = ["the", "cat", "dog", "saw", "liked", "a", "red", "blue", "house", "boat"]


def write_split(folder: Path, task: str, split: str, count: int) -> None:
    """Write a split as the hub has it: ClassLabel names in the metadata, an index, secret labels of test."""
    columns, names = FORMAT[task]
    texts = {
        name: [
            " ".join(WORDS[(row * 7 + at * place) % len(WORDS)] for at in range(6)) + f" {split}{row}"
            for row in range(count)
        ]
        for place, name in enumerate(columns, start=1)
    }
    secret, kind = split == "test", pa.float32() if names is None else pa.int64()
    labels = [-1 if secret else row % (len(names) if names else 5) for row in range(count)]
    feature = {"dtype": "float32", "_type": "Value"} if names is None else {"names": names, "_type": "ClassLabel"}
    metadata = {"huggingface": json.dumps({"info": {"features": {"label": feature}}})}
    table = pa.table({**texts, "label": pa.array(labels, kind), "idx": pa.array(range(count), pa.int32())})
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata(metadata), folder / f"{split}-00000-of-00001.parquet")


def write_roberta(folder: Path) -> None:
    """Write RoBERTa-base with random weights, and a tokenizer of whole words with RoBERTa's special tokens."""
    from transformers import RobertaConfig, RobertaModel

    from tests.text.small_project import make_base

    make_base(folder)  # its tokenizer stays
    sizes: dict[str, Any] = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    RobertaModel(RobertaConfig(vocab_size=50265, **sizes)).save_pretrained(folder)


@pytest.mark.nightly
def test_a_dry_run_of_its_own_architecture(tmp_path: Path) -> None:
    """Twelve layers of 768, three of the tasks in GLUE's own format, one step each; two methods."""
    root = tmp_path / "project"
    project_of(EXAMPLE / "studies.yaml", root)
    for name in ("dvc.yaml", "mergeflow", "tasks", "registry"):
        (root / name).symlink_to(ROOT / name)
    write_roberta(root / "inputs/roberta")
    for task in FORMAT:
        for split, count in {"train": 12, "validation": 6, "test": 6}.items():
            write_split(root / "inputs" / task, task, split, count)
    values = yaml.safe_load((root / "params.yaml").read_text())
    values["tasks"] = {task: f"parquet:inputs/{task}?metric={GLUE.get(task, 'accuracy')}" for task in FORMAT}
    values["data"]["tokenizer"] = values["model"]["pretrained"] = "inputs/roberta"
    values["finetune"] |= {"regime": "steps", "steps": 1, "batch_size": 2}
    values["run"]["device"] = "cpu"
    (root / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    run_pipeline(root, ("prepare", "base"))
    choices = yaml.safe_load((root / "studies/params.yaml").read_text())
    choices |= {"seeds": [0], "runs": {"experts": {}}}
    (root / "studies/params.yaml").write_text(yaml.safe_dump(choices, sort_keys=False))
    train_run(root, "experts")
    small: dict[str, Any] = {
        "methods": {"average": {}, "task_arithmetic": {"scale": {"low": 0.3, "high": 0.3, "step": 0.1, "start": 0.3}}},
        "together": {},
        "compressed": {},
        "adapted": {"directions": [], "rates": [0.1], "steps": 1},
        "probed": ["average"],
        "embeddings": {"embeddings.": ["average"]},
    }
    rows = read_rows(run_study(root, "glue", tmp_path / "scratch", **small) / "rows.parquet")
    assert set(select(rows, part="model").model) == {"base", "individual", "average", "task_arithmetic"}
    assert set(select(rows, part="model").task) == set(FORMAT)
