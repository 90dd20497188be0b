"""Sources of texts, and what is refused in them: every fault with its row and the way out."""

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mergeflow.data import load_manifest
from mergeflow.data.address import open_source
from mergeflow.data.prepare import prepare_task
from mergeflow.errors import MergeflowError
from mergeflow.modalities.text.preparation import SOURCES, TRANSFORMS, decoding
from mergeflow.modalities.text.sections import DataSection

Rows = list[dict[str, Any]]
ROWS: Rows = [{"text": f"the cat is {'very ' * k}nice", "label": ["no", "yes"][k % 2]} for k in range(20)]


def write(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepared(base: Path, root: Path, source: str, max_length: int = 36) -> dict[str, Any]:
    """Prepare a source in a folder of its own; return the manifest."""
    raw = open_source("task", source, SOURCES, TRANSFORMS, root=root)
    section = DataSection(tokenizer=str(base), max_length=max_length)
    prepare_task(raw, root / "out", decoding(section, root))
    return load_manifest(root / "out")


def test_the_four_kinds_of_file_give_the_same_task(base: Path, tmp_path: Path) -> None:
    write(tmp_path / "jsonl/train.jsonl", ROWS)
    table = pa.Table.from_pylist(ROWS)
    (tmp_path / "parquet/data").mkdir(parents=True)
    for number, part in enumerate((table[:7], table[7:])):
        pq.write_table(part, tmp_path / f"parquet/data/train-{number:05}-of-00002.parquet")
    files = (("csv", "csv", ","), ("excel", "csv", ";"), ("quoted", "csv", "\t"), ("tsv", "tsv", "\t"))
    for folder, kind, mark in files:
        (tmp_path / folder).mkdir()
        rows = [mark.join(row.values()) for row in ROWS]
        (tmp_path / folder / f"train.{kind}").write_text("\n".join([mark.join(ROWS[0]), *rows]) + "\n")
    (tmp_path / "gz").mkdir()
    (tmp_path / "gz/train.csv.gz").write_bytes(gzip.compress((tmp_path / "csv/train.csv").read_bytes()))
    sources = ("jsonl:jsonl", "parquet:parquet", *(f"{kind}:{folder}" for folder, kind, _ in files), "csv:gz")
    manifests = [prepared(base, tmp_path, source) for source in sources]
    assert manifests[0]["class_names"] == ["no", "yes"]
    counts = [{split: each["count"] for split, each in manifest["splits"].items()} for manifest in manifests]
    assert counts == [{"train": 16, "validation": 2, "test": 2}] * 7


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "tsv"])
def test_columns_of_any_name_are_chosen_behind_the_source(tmp_path: Path, kind: str) -> None:
    rows = [
        {"text": "no", "a title": f"{k}", "Körper": f"{k + 1}", "label": "x", "class": f"0{k % 2}"} for k in range(20)
    ]
    path = tmp_path / f"in.{kind}"
    if kind == "jsonl":
        write(path, rows)
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        mark = {"csv": ",", "tsv": "\t"}[kind]
        path.write_text("\n".join(mark.join(row) for row in ([*rows[0]], *(row.values() for row in rows))) + "\n")
    source = f"{kind}:in.{kind}?text=a title&text_pair=Körper&label=class"
    raw = open_source("task", source, SOURCES, TRANSFORMS, root=tmp_path)
    first = next(raw.splits["train"]())
    assert (first.read(), first.label, raw.class_names) == ({"text": "0", "text_pair": "1"}, 0, ["00", "01"])
    raw = open_source("task", f"{kind}:in.{kind}?label=class", SOURCES, TRANSFORMS, root=tmp_path)
    assert raw.class_names == ["00", "01"]
    for query, fault in {
        "text=titel": r"unknown column 'titel': did you mean 'a title'\?",
        "text_pair=text": "choose `text` too",
        "text=text&label=text": "text and label are one column",
        "image=text": "expected text or text_pair or label",
    }.items():
        with pytest.raises(MergeflowError, match=fault):
            open_source("task", f"{kind}:in.{kind}?{query}", SOURCES, TRANSFORMS, root=tmp_path)
    with pytest.raises(MergeflowError, match=r"suite: is no table, so `text=` chooses nothing"):
        open_source("task", "suite:sentences8/mood?text=a", SOURCES, TRANSFORMS, root=tmp_path)


def test_tables_keep_quotes_and_words_like_null(base: Path, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/train.tsv").write_text('sentence\tlabel\n12\t0\nnull\t1\na "word\t0\n' + "cat\t1\n" * 9)
    raw = open_source("task", "tsv:rows", SOURCES, TRANSFORMS, root=tmp_path)
    examples = list(raw.splits["train"]())
    assert [example.read()["text"] for example in examples[:3]] == ["12", "null", 'a "word']
    assert raw.class_names == ["0", "1"]
    assert [example.label for example in examples[:3]] == [0, 1, 0]


def glue(folder: Path, names: list[str] | None) -> None:
    """Write a snapshot as the hub has GLUE: idx, ClassLabel names, and secret labels in test."""
    import datasets

    label = datasets.Value("float32") if names is None else datasets.ClassLabel(names=names)
    features = datasets.Features({"sentence": datasets.Value("string"), "label": label, "idx": datasets.Value("int32")})
    folder.mkdir(parents=True)
    for split, count in {"train": 40, "validation": 10, "test": 10}.items():
        rows = [{"sentence": f"{split} {k}", "label": -1 if split == "test" else k % 2, "idx": k} for k in range(count)]
        datasets.Dataset.from_list(rows, features=features).to_parquet(folder / f"{split}-00000-of-00001.parquet")


def test_a_data_set_in_the_layout_of_the_hub_whose_test_labels_are_secret(base: Path, tmp_path: Path) -> None:
    glue(tmp_path / "glue", ["bad", "good"])
    for source in ("hf:glue", "parquet:glue"):
        manifest = prepared(base, tmp_path, source)
        assert manifest["class_names"] == ["bad", "good"]
        counts = {split: facts["count"] for split, facts in manifest["splits"].items()}
        assert counts == {"train": 36, "validation": 4, "test": 10}
        assert manifest["splits"]["validation"]["carved_from"] == "train"
        assert manifest["ignored_splits"] == ["test (its labels are secret), for which validation stands"]


def test_glue_has_its_own_figures(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mergeflow.modalities import tables

    glue(tmp_path / "glue", ["bad", "good"])
    read = tables.load_splits
    asked: list[tuple[Any, ...]] = []

    def local(*names: Any) -> Any:
        asked.append(names[:3])
        return read(str(tmp_path / "glue"), None, None, names[3])

    monkeypatch.setattr(tables, "load_splits", local)
    raw = open_source("cola", "hf:nyu-mll/glue#cola@main", SOURCES, TRANSFORMS, root=tmp_path)
    assert asked == [("nyu-mll/glue", "cola", "main")]
    assert [transform.text for transform in raw.transforms] == ["metric=matthews"]
    assert raw.keeps_conflicts


def test_a_task_of_the_embedded_suite_brings_its_figure() -> None:
    raw = open_source("acceptability", "suite:sentences8", SOURCES, TRANSFORMS)
    assert [transform.text for transform in raw.transforms] == ["metric=matthews"]
    assert set(next(raw.splits["test"]()).read()) == {"text"}
    raw = open_source("likeness", "suite:sentences8/similarity?fraction=.1", SOURCES, TRANSFORMS)
    assert raw.class_names is None
    assert [transform.text for transform in raw.transforms[:2]] == ["pairs", "metric=pearson"]
    assert set(next(raw.splits["test"]()).read()) == {"text", "text_pair", "score"}
    with pytest.raises(MergeflowError, match="unknown task of suite sentences8 'sentimnt': did you mean 'sentiment'"):
        open_source("sentimnt", "suite:sentences8", SOURCES, TRANSFORMS)


def test_over_long_texts_are_cut_and_counted(base: Path, tmp_path: Path) -> None:
    write(tmp_path / "rows/train.jsonl", ROWS)
    manifest = prepared(base, tmp_path, "jsonl:rows", max_length=16)
    notes = manifest["splits"]["train"]["notes"]
    assert sum(notes.values()) > 5
    (note,) = notes
    assert note == "more than 16 tokens; what is beyond was cut"
    count = manifest["splits"]["train"]["count"]
    assert f"train: {notes[note]} of {count} examples have {note}." in manifest["warnings"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*ROWS, {"text": "  ", "label": "no"}], r"row 20 \('train.jsonl:20'\): its text is empty"),
        ([*ROWS, {"text": None, "label": "no"}], r"row 20 \('train.jsonl:20'\): its text is empty"),
        ([*ROWS, {"text": "cat", "label": None}], r"train.jsonl, row 20: no label \(1 such rows\)"),
        ([*ROWS, {"text": "cat", "label": " "}], r"train.jsonl, row 20: no label \(1 such rows\)"),
        (
            [*({"text": f"cat {k}", "score": k / 2} for k in range(20)), {"text": "dog", "score": float("inf")}],
            "train.jsonl, row 20: score inf is not a finite number",
        ),
        ([{"words": "cat", "label": "no"}], "no text found among the columns 'words', 'label'; expected a column"),
        ([{"text": "cat", "kind": "no"}], "no label found among the columns 'text', 'kind'"),
        ([{"text": "a", "premise": "b", "hypothesis": "c", "label": 1}], "more than one text or pair found"),
        (
            [*ROWS, {"text": "the cat is nice", "label": "yes"}],
            r"'train.jsonl:20' \(train, 'yes'\) has the content of .*conflicts=keep",
        ),
        ([{"text": "cat", "label": "no"}] * 4, r"one class only \('no'\) found"),
        ([{"text": ["cat"], "label": "no"}], r"the column 'text' holds values of the type list<.*>; expected texts"),
        ([{"text": 12, "label": "no"}], "the column 'text' holds values of the type int64; expected texts"),
        ([{"text": "cat", "label": ["no"]}], r"'label' holds values of the type list<.*>; expected one class or"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(base: Path, tmp_path: Path, rows: Rows, message: str) -> None:
    write(tmp_path / "rows/train.jsonl", rows)
    with pytest.raises(MergeflowError, match=f"(?s){message}"):
        prepared(base, tmp_path, "jsonl:rows")


def test_a_label_that_train_lacks_is_refused(base: Path, tmp_path: Path) -> None:
    write(tmp_path / "rows/train.jsonl", ROWS)
    write(tmp_path / "rows/test.jsonl", [{"text": "dog", "label": "no"}, {"text": "emu", "label": "maybe"}])
    with pytest.raises(MergeflowError, match=r"test.jsonl, row 1: label 'maybe' is not .* of train, .*'no', 'yes'"):
        prepared(base, tmp_path, "jsonl:rows")


def test_labels_are_classes_by_name_whatever_their_order_in_a_file(tmp_path: Path) -> None:
    """A test split, or a shard, that numbers its classes otherwise had the wrong labels, without a word."""
    import datasets

    def shard(name: str, *names: str) -> None:
        label = datasets.ClassLabel(names=list(names))
        rows = [{"text": f"{name} {k} {text}", "label": text} for k in range(9) for text in ("bad", "good")]
        features = datasets.Features({"text": datasets.Value("string"), "label": label})
        (tmp_path / name).parent.mkdir(exist_ok=True)
        datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / name)

    shard("rows/train.parquet", "bad", "good")
    shard("rows/test.parquet", "good", "bad")
    raw = open_source("task", "parquet:rows", SOURCES, TRANSFORMS, root=tmp_path)
    assert raw.class_names
    assert all(raw.class_names[example.label] in example.read()["text"] for example in raw.splits["test"]())
    shard("shards/train-00000-of-00002.parquet", "bad", "good")
    shard("shards/train-00001-of-00002.parquet", "good", "bad")
    with pytest.raises(MergeflowError, match=r"parts of train number their classes differently.*write them again"):
        open_source("task", "parquet:shards", SOURCES, TRANSFORMS, root=tmp_path)


def test_labels_that_look_equal_are_one_class_and_those_that_nearly_do_are_told(base: Path, tmp_path: Path) -> None:
    write(tmp_path / "rows/train.jsonl", [{**row, "label": f"Größe {row['label']}"} for row in ROWS])
    rows = [{"text": f"dog {end}", "label": f"Gro\u0308ße {end}"} for end in ("no", "yes ")]
    write(tmp_path / "rows/test.jsonl", rows)
    assert prepared(base, tmp_path, "jsonl:rows")["splits"]["test"]["per_class"] == [1, 1]
    write(tmp_path / "rows.jsonl", [{"text": f"dog {k}", "label": ["no", "No", "yes"][k % 3]} for k in range(30)])
    warnings = prepared(base, tmp_path, "jsonl:rows.jsonl")["warnings"]
    assert "classes whose names differ in upper and lower case alone: 'No', 'no'." in warnings


def test_the_same_pair_in_two_splits_leaves_train(base: Path, tmp_path: Path) -> None:
    pairs = [{"premise": f"the cat {'very ' * k}", "hypothesis": "dog", "label": k % 2} for k in range(12)]
    write(tmp_path / "rows/train.jsonl", pairs)
    write(tmp_path / "rows/test.jsonl", [*pairs[:2], {"premise": "dog", "hypothesis": "the cat", "label": 1}])
    manifest = prepared(base, tmp_path, "jsonl:rows")
    removed = [manifest["splits"][split]["duplicates_removed"] for split in ("train", "validation")]
    assert sum(counts.get("test", 0) for counts in removed) == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("jsonl:rows?metric=pearson", "found 'pearson', but this task's labels are classes; expected one of matthews"),
        ("jsonl:three?metric=f1", "found 'f1', which is of two classes, but the task has 3.*expected macro_f1"),
        ("jsonl:rows?metric=acuracy", "unknown metric 'acuracy': did you mean 'accuracy'"),
        ("jsonl:gone", "gone': no such file or folder"),
        ("parquet:rows", "rows holds no Parquet file"),
        ("jsn:rows", "unknown kind of data source 'jsn': did you mean 'jsonl'"),
    ],
)
def test_wrong_sources_are_refused(tmp_path: Path, source: str, message: str) -> None:
    write(tmp_path / "rows/train.jsonl", ROWS)
    write(tmp_path / "three/train.jsonl", [*ROWS, {"text": "dog", "label": "maybe"}, {"text": "emu", "label": "maybe"}])
    with pytest.raises(MergeflowError, match=message):
        open_source("task", source, SOURCES, TRANSFORMS, root=tmp_path)


CSV = "text,label\n"


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.tsv", "text\tlabel\ncat\t1".encode("utf-16"), "is not in UTF-8"),
        ("a.csv", f"{CSV}cat,1\n".encode("utf-16"), "is not in UTF-8"),
        ("a.csv", f"{CSV}café,1\n".encode("latin-1"), "is not in UTF-8"),
        ("a.csv", "text,label\ncat,grün\ndog,rot\n".encode("latin-1"), "is not in UTF-8: byte 17 is 0xfc"),
        ("a.jsonl", '{"text": "café", "label": 1}\n'.encode("latin-1"), "is not in UTF-8"),
        ("a.jsonl", b'{"text": "a", "label": "b"}\n\n{"text": "c", "label": 3}\n', 'has "b" in line 1 and 3 in line 3'),
        ("a.jsonl", b'{"text": "a", "label": 0}\n{"text": "b", "label": true}\n', "has 0 in line 1 and true in line 2"),
        ("a.jsonl", b'[{"text": "cat", "label": 1}]\n', r"line 1 is \[.*expected an object"),
        ("a.jsonl", b'{"text": "a", "label": 1}\n{"text": "b"\n', "line 2 is not JSON.*name it by its kind: parquet"),
        ("a.jsonl", b'{"text": "cat", "label": 100000000000000000000}\n', "too large"),
        (
            "a.jsonl",
            b'{"text": "a", "score": 1.5}\n{"text": "b", "score": 1.5}\n',
            "every score is 1.5; expected numbers",
        ),
        ("a.csv", b"text|label\n" + b"cat|yes\n" * 4, "'text.+label' is its one column; expected"),
        ("a.tsv", b"text,label\n" + b"cat,yes\n" * 4, "'text.+label' is its one column; expected"),
        ("a.tsv", b"text\tlabel\tlabel\n" + b"cat\tyes\tno\n" * 4, "two columns are called 'label'; expected names"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "cat", "label": 1}\n')[:-9], "cannot be read: Compressed file ended"),
        ("a.csv", f"{CSV}cat,1\ncat,2\ncat,NA\n".encode(), r"row 2: no label \(1 such rows\)"),
        ("a.csv", f"{CSV}cat,0.5\ncat,2\ncat,NaN\n".encode(), r"row 2: no label \(1 such rows\)"),
    ],
)
def test_a_file_that_is_no_use_is_told_with_its_place(tmp_path: Path, name: str, content: bytes, fault: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MergeflowError, match=f"{name}.*{fault}"):
        open_source("task", f"{name.split('.')[1]}:{name}", SOURCES, TRANSFORMS, root=tmp_path)


def test_values_of_several_types_do_no_harm_in_a_column_that_no_example_needs(tmp_path: Path) -> None:
    rows = [{"id": 1, **ROWS[0]}, {"id": "b", "note": {"x": 1}, **ROWS[1]}, {"id": None, "note": "x", **ROWS[2]}]
    write(tmp_path / "train.jsonl", rows)
    raw = open_source("task", "jsonl:train.jsonl", SOURCES, TRANSFORMS, root=tmp_path)
    assert [example.content["text"] for example in raw.splits["train"]()] == [row["text"] for row in rows]


def test_f1_is_taken_of_the_two_classes_that_a_transform_leaves(tmp_path: Path) -> None:
    write(tmp_path / "three/train.jsonl", [*ROWS, {"text": "dog", "label": "maybe"}, {"text": "emu", "label": "maybe"}])
    raw = open_source("task", "jsonl:three?classes=1,2&metric=f1", SOURCES, TRANSFORMS, root=tmp_path)
    assert raw.transforms[-1].text == "metric=f1"


def test_texts_and_labels_that_look_like_dates_stay_as_they_are_written(tmp_path: Path) -> None:
    rows = [{"text": "2020-01-01", "label": "2021-12-31"}, {"text": "2020-01-02", "label": "2022-12-31"}]
    write(tmp_path / "rows/train.jsonl", rows)
    task = open_source("task", "jsonl:rows", SOURCES, TRANSFORMS, root=tmp_path)
    assert task.class_names == ["2021-12-31", "2022-12-31"]
    assert [example.content["text"] for example in task.splits["train"]()] == ["2020-01-01", "2020-01-02"]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["01", "1", "02"], ["01", "02", "1"]),
        (["10", "9", "9"], ["9", "10"]),
        (["0", "-1"], ["-1", "0"]),
        (["+1", "-1", "-1"], ["+1", "-1"]),
        (["12:30", "09:15"], ["09:15", "12:30"]),
        (["2020-01-01 00:00", "2020-01-01"], ["2020-01-01", "2020-01-01 00:00"]),
        (["null", "NA"], ["NA", "null"]),
        ([f"{10**22}", f"{10**22 + 1}"], [f"{10**22}", f"{10**22 + 1}"]),
    ],
)
def test_labels_that_are_written_differently_are_different(tmp_path: Path, labels: list[str], names: list[str]) -> None:
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(f"cat,{label}\n" for label in labels))
    assert open_source("task", "csv:train.csv", SOURCES, TRANSFORMS, root=tmp_path).class_names == names


def test_columns_without_a_name_are_of_no_account(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(",text,label,,\n" + "".join(f"{k},cat {k},{k % 2},,\n" for k in range(4)))
    task = open_source("task", "csv:train.csv", SOURCES, TRANSFORMS, root=tmp_path)
    assert [example.read()["text"] for example in task.splits["train"]()] == [f"cat {k}" for k in range(4)]


def test_numbers_of_excel_have_a_comma_where_semicolons_are_between_columns(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text;score\ncat, dog;1\ncat;-2,5\ndog;3,25\n")
    task = open_source("task", "csv:train.csv", SOURCES, TRANSFORMS, root=tmp_path)
    assert task.class_names is None
    assert [(example.read()["text"], example.read()["score"]) for example in task.splits["train"]()] == [
        ("cat, dog", 1.0),
        ("cat", -2.5),
        ("dog", 3.25),
    ]


def test_classes_that_are_decimal_numbers_give_a_warning(base: Path, tmp_path: Path) -> None:
    write(tmp_path / "rows/train.jsonl", [row | {"label": ["0.5", "-1,25"][k % 2]} for k, row in enumerate(ROWS)])
    (warning,) = prepared(base, tmp_path, "jsonl:rows")["warnings"]
    assert "'-1,25', '0.5'. For a regression write numbers" in warning


def test_texts_of_several_lines_are_read_from_a_table_of_any_size(tmp_path: Path) -> None:
    text = "the cat is nice,\n" * 20
    rows = [f'{["no", "yes"][k % 2]},"{k} {text}"\n' for k in range(6000)]  # 2 MB: more than pyarrow reads at once
    (tmp_path / "train.csv").write_text("label,text\n" + "".join(rows))
    task = open_source("task", "csv:train.csv", SOURCES, TRANSFORMS, root=tmp_path)
    examples = list(task.splits["train"]())
    assert len(examples) == len(rows)
    assert examples[-1].read() == {"text": f"5999 {text}"}


def test_labels_of_bytes_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["cat", "dog"], "label": [b"a", b"b"]}), tmp_path / "train.parquet")
    with pytest.raises(MergeflowError, match="'label' holds values of the type binary; expected one class or number"):
        open_source("task", "parquet:train.parquet", SOURCES, TRANSFORMS, root=tmp_path)


@pytest.mark.parametrize(("scale", "names"), [(1, None), (0, ["0", "1", "2"])])
def test_decimal_numbers_are_numbers_whole_ones_classes(tmp_path: Path, scale: int, names: list[str] | None) -> None:
    written = [Decimal(k % 3).scaleb(-scale) for k in range(20)]
    label = pa.array(written, pa.decimal128(4, scale))
    pq.write_table(pa.table({"text": [f"cat {k}" for k in range(20)], "label": label}), tmp_path / "train.parquet")
    task = open_source("task", "parquet:train.parquet", SOURCES, TRANSFORMS, root=tmp_path)
    assert task.class_names == names
    examples = list(task.splits["train"]())[:3]
    labels = [example.read()["score"] if names is None else example.label for example in examples]
    assert labels == [0, 10**-scale, 2 * 10**-scale]


def test_parts_of_a_split_whose_columns_differ_in_type_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "rows/train-00000-of-00002.jsonl", ROWS)
    write(tmp_path / "rows/train-00001-of-00002.jsonl", [{"text": "cat", "label": 1}])
    with pytest.raises(MergeflowError, match=r"the parts of train do not fit together: .*label"):
        open_source("task", "jsonl:rows", SOURCES, TRANSFORMS, root=tmp_path)


def test_a_local_folder_is_a_name_alone_whatever_signs_are_in_it(tmp_path: Path) -> None:
    from mergeflow.modalities.tables import HubPlace, parse_place

    (tmp_path / "glue#rte@main").mkdir()
    assert parse_place("glue#rte@main", tmp_path) == HubPlace(str(tmp_path / "glue#rte@main"))
    assert parse_place("owner/glue@v1#rte", tmp_path) == HubPlace("owner/glue", None, "v1#rte")
