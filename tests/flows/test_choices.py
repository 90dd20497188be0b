"""What is wrong in params.yaml is told before anything starts."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from rich.console import Console

from flows.run_command import bring_up_to_date
from mergeflow import cli
from mergeflow.errors import MergeflowError
from mergeflow.modalities.preparing import find_preparation
from tasks.memory import check_project
from tasks.project.new import new_project
from tasks.project.validate_params import check_base, source_faults, validate_params
from tests.project_folder import change_params
from tests.toy_project import make_toy_project


def test_every_source_that_cannot_be_opened_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = make_toy_project(tmp_path / "toy")
    monkeypatch.chdir(project)
    sources = project / "sources"
    sources.mkdir()
    (sources / "series.py").write_text(
        "from mergeflow.data.decoding import Source\nSERIES = Source('series', 'toy', print)\n"
    )
    assert list(validate_params(project).tasks) == ["left", "right"]
    wrong = {"kind": "tyo:clouds", "plain": "clouds", "empty": "toy:", "turned": "toy:clouds?conflict=keep&rotat=1"}
    wrong |= {"gone": "series:inputs/wells.csv", "absolute": f"series:{tmp_path}/none.csv"}
    change_params(project, {"tasks": wrong})
    with pytest.raises(MergeflowError) as raised:
        validate_params(project)
    lines = str(raised.value).splitlines()
    expected = [
        "params.yaml has 7 faults:",
        "tasks.kind: unknown kind of data source 'tyo': did you mean 'toy'?",
        "tasks.plain: 'clouds' does not begin with its kind: write KIND:clouds, with one of the kinds series, toy",
        "tasks.empty: 'toy:' has no address; expected 'toy:ADDRESS'",
        "tasks.turned: conflict=keep: unknown transform 'conflict': did you mean 'conflicts'?",
        "tasks.turned: rotat=1: unknown transform 'rotat'",
        "tasks.gone: 'inputs/wells.csv': no such file or folder",
        f"tasks.absolute: '{tmp_path}/none.csv': no such file or folder",
    ]
    assert len(lines) == len(expected)
    assert [line for text, line in zip(expected, lines, strict=True) if text not in line] == []
    (project / "inputs").mkdir(exist_ok=True)
    (project / "inputs/wells.csv").write_text("1,0\n")
    right = {"gone": "series:inputs/wells.csv?conflicts=keep&validation=join", "many": "series:inputs/*.csv"}
    change_params(project, {"tasks": right})
    assert validate_params(project).tasks["gone"].startswith("series")


TABLES = {
    "rows.csv": '"body";"tag"\r\n"a";1\r\n',
    "rows.tsv": "body\ttag\r\na\t1\r\n",
    "rows.jsonl": '{"tag": 1}\n\n{"tag": 2, "body": "a"}\n',
}


@pytest.mark.parametrize(
    ("modality", "source", "message"),
    [
        ("vision", "suite:pocet8", "unknown suite 'pocet8': did you mean 'pocket8'"),
        ("vision", "suite:pocket8/digts", "unknown task of suite pocket8 'digts': did you mean 'digits'"),
        ("vision", "torchvision:MNISTT", "unknown real data set 'MNISTT': did you mean 'MNIST'"),
        ("text", "suite:sentences", "unknown suite of texts 'sentences': did you mean 'sentences8'"),
        ("causal", "suite:boks", "unknown suite of causal models 'boks': did you mean 'books'"),
        ("vision", "folder:nope", "'nope': no such file or folder"),
        ("vision", "parquet:nope.parquet", "'nope.parquet': no such file or folder"),
        ("text", "csv:nope.csv", "'nope.csv': no such file or folder"),
        ("causal", "jsonl:nope", "'nope': no such file or folder"),
        (
            "text",
            "parquet:rows.parquet?text=bdoy&label=tag",
            "rows.parquet: unknown column 'bdoy': did you mean 'body'?",
        ),
        ("text", "csv:rows.csv?text=bdoy&label=tag", "rows.csv: unknown column 'bdoy': did you mean 'body'?"),
        ("text", "tsv:rows.tsv?text=body&label=tga", "rows.tsv: unknown column 'tga': did you mean 'tag'?"),
        ("causal", "jsonl:rows.jsonl?text=bdoy", "rows.jsonl: unknown column 'bdoy': did you mean 'body'?"),
        ("text", "jsonl:rows.jsonl?text=body&label=tag&metric=f11", "metric=f11: "),
        ("text", "csv:rows.csv?text=body&label=tag&metric=f11", "metric=f11: "),
        ("text", "tsv:rows.tsv?text=body&label=tag&metric=f11", "metric=f11: "),
        ("vision", "suite:pocket8?fraction=2", "fraction=2: found '2'; expected a fraction above 0"),
        ("vision", "suite:pocket8?rotate=abc", "rotate=abc: found 'abc'; expected an angle"),
        ("vision", "suite:pocket8?classes=0-9&rotate=400", "rotate=400: found '400'"),
        ("vision", "suite:pocket8?classes=5-10", "classes=5-10: found 5-10; the task has the labels 0"),
        ("vision", "torchvision:MNIST?classes=7-5", "classes=7-5: found 7-5; "),
        ("vision", "hf:owner/name?shuffle_labels=x", "shuffle_labels=x: found 'x'; expected a seed"),
        ("text", "hf:owner/name?metric=f11", "metric=f11: "),
        ("vision", "suite:pocket8?label=x", "suite: is no table, so `label=` chooses nothing"),
        ("vision", "s3://bucket/x?validation=jon", "'s3://bucket/x?validation=jon' does not begin with its kind"),
        ("vision", "folder:s3://bucket/x?validation=jon", "validation=jon: found 'jon'; expected 'join' or 'drop'"),
    ],
)
def test_names_of_data_that_do_not_exist_are_told_before_anything_runs(
    tmp_path: Path, modality: str, source: str, message: str
) -> None:
    pq.write_table(pa.table({"body": ["a"], "tag": [1]}), tmp_path / "rows.parquet")
    for name, text in TABLES.items():
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    preparation = find_preparation(modality)
    assert [str(fault)[: len(message)] for fault in source_faults("digits", source, preparation, tmp_path)] == [message]
    if source.startswith(("suite", "torchvision")) and "?" not in source:  # a task that is frozen is not prepared again
        assert list(source_faults("digits", source, preparation, None)) == []


@pytest.mark.parametrize(
    ("modality", "source"),
    [
        ("vision", "suite:pocket8?classes=0-3&shuffle_labels=7&rotate=45&fraction=.5&validation=join"),
        ("vision", "suite:pocket8?colour=0.9"),
        ("vision", "torchvision:MNIST?colour=0.9"),
        ("vision", "hf:owner/name?classes=17,200-300&conflicts=keep"),
        ("vision", "parquet:s3://bucket/x?image=picture&label=kind"),
        ("text", "hf:owner/name?classes=0,1&metric=f1"),
        ("text", "hf:nyu-mll/glue#stsb?metric=spearman"),
        ("text", "csv:inputs/a.csv?text=body&metric=f1"),
        ("causal", "suite:books?fraction=.5"),
        ("text", "parquet:rows.parquet?text=body&label=tag&fraction=.5"),
        ("text", "parquet:inputs?text=body"),  # no Parquet: `prepare` says so
        ("text", "parquet:inputs/a.csv?text=body"),
    ],
)
def test_right_options_of_sources_have_no_faults(tmp_path: Path, modality: str, source: str) -> None:
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs/a.csv").write_text("body,label\n")
    pq.write_table(pa.table({"body": ["a"], "tag": [1]}), tmp_path / "rows.parquet")
    task = "harbour" if modality == "causal" else "digits"
    assert list(source_faults(task, source, find_preparation(modality), tmp_path)) == []


@pytest.mark.parametrize("place", ["inputs/bert", "./inputs/bert", "../texts/inputs/bert"])
def test_a_base_that_is_not_there_is_told_before_the_data_are_prepared(tmp_path: Path, place: str) -> None:
    new_project(tmp_path / "texts", "text")
    file = tmp_path / "texts/params.yaml"
    text = file.read_text().replace("pretrained: sentences8", f"pretrained: {place}")
    file.write_text(text.replace("tokenizer: sentences8", f"tokenizer: {tmp_path}/gone"))
    with pytest.raises(MergeflowError) as raised:
        validate_params(tmp_path / "texts")
    assert f"model.pretrained: '{place}': no such file or folder" in str(raised.value)
    assert f"data.tokenizer: '{tmp_path}/gone': no such file or folder" in str(raised.value)
    (tmp_path / "texts/inputs/bert").mkdir()
    (tmp_path / "gone").mkdir()
    params = validate_params(tmp_path / "texts")
    with pytest.raises(MergeflowError, match=rf"'{place}' has no config\.json"):
        check_base(tmp_path / "texts", params)
    (tmp_path / "texts/inputs/bert/config.json").write_text("{}")
    check_base(tmp_path / "texts", params)


@pytest.mark.parametrize(
    ("modality", "right", "wrong", "message"),
    [
        ("vision", "architecture: pocket-clip", "architecture: pocket-clap", "did you mean 'pocket-clip'"),
        ("vision", "architecture: pocket-clip", "architecture: ViT-B-32", "unknown pretrained tag of ViT-B-32"),
        ("vision", "pretrained: pocket8", "pretrained: pokcet8", "did you mean 'pocket8-prints'"),
        ("vision", "image_size: 32", "image_size: 64", "data.image_size is 64, but pocket-clip takes 32"),
        ("toy", "inputs: 8", "inputs: 9", r"make them equal"),
        ("text", "pretrained: sentences8", "pretrained: sentenses8", "did you mean 'sentences8'"),
        ("text", "tokenizer: sentences8", "tokenizer: sentenses8", "did you mean 'sentences8'"),
    ],
)
def test_a_base_that_cannot_be_is_told_before_the_data_are_prepared(
    tmp_path: Path, modality: str, right: str, wrong: str, message: str
) -> None:
    new_project(tmp_path / "new", modality)
    file = tmp_path / "new/params.yaml"
    text = file.read_text()
    assert right in text
    check_base(tmp_path / "new", validate_params(tmp_path / "new"))
    file.write_text(text.replace(right, wrong))
    with pytest.raises(MergeflowError, match=message):
        check_project(tmp_path / "new", None, Console(quiet=True))
    if modality == "toy":  # the run reads all code first, which takes seconds
        with pytest.raises(MergeflowError, match=message):
            bring_up_to_date(tmp_path / "new", Console(quiet=True))


def test_a_push_without_a_remote_is_told_before_anything_runs(tmp_path: Path) -> None:
    """After hours of training it was `dvc push` that said so, and no result was printed."""
    project = make_toy_project(tmp_path / "toy")
    (project / ".dvc").mkdir()  # as `dvc init --no-scm` does
    (project / ".dvc/config").write_text("[core]\n    no_scm = True\n")
    with pytest.raises(MergeflowError, match=r"--push has nowhere to go: name a remote, `dvc remote add"):
        bring_up_to_date(project, Console(quiet=True), push=True)
    assert not (project / "outputs/data").exists()


def test_methods_that_the_pipeline_cannot_sweep_are_told_at_once(tmp_path: Path) -> None:
    project = make_toy_project(tmp_path / "toy")
    informed = {"fisher": {}, "regmean": {}, "adamerging": {}}
    swept = {"average": {}, "slerp": {}, **informed, "nearswap": {}, "consensus": {"min_agree": [2, 3]}}
    change_params(project, {"sweep": swept})
    with pytest.raises(MergeflowError) as raised:
        validate_params(project)
    lines = str(raised.value).splitlines()
    assert lines[0] == "params.yaml has 5 faults:"
    for line, (name, statistic) in zip(
        lines[1:4], [("fisher", "fisher"), ("regmean", "gram"), ("adamerging", "coefficients")], strict=True
    ):
        assert f"sweep.{name}: it goes by statistics of examples ({statistic}), which no stage takes" in line
    assert "sweep.nearswap: it takes 1 expert, and params.yaml has 2 tasks" in lines[4]
    assert "sweep.consensus: method 'consensus': min_agree is 3, but there are 2 experts" in lines[5]


def test_a_mistyped_task_takes_no_outputs_away(tmp_path: Path) -> None:
    project = make_toy_project(tmp_path / "toy")
    made = [project / "outputs/experts/left/model.safetensors", project / ".mergeflow/manifests/finetune@left.json"]
    for path in made:
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    change_params(project, {"tasks": {"lefd": "tyo:clouds", "right": "toy:clouds"}})
    with pytest.raises(MergeflowError, match=r"tasks\.lefd: unknown kind"):
        bring_up_to_date(project, Console(quiet=True))
    assert all(path.exists() for path in made)


def test_a_broken_method_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = make_toy_project(tmp_path / "toy")
    monkeypatch.chdir(project)
    (project / "methods").mkdir()
    (project / "methods/mine.py").write_text("import torsh\n")
    with pytest.raises(MergeflowError, match=r"^[^\n]*mine.py' cannot be loaded, line 1 of [^\n]*torsh[^\n]*$"):
        validate_params(project)


@pytest.mark.parametrize("command", ["run", "stage run vectors", "registry list", "add-task inputs/x"])
def test_every_command_names_a_file_in_another_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    project = make_toy_project(tmp_path / "toy")
    (project / "params.yaml").write_bytes("seed: 0\n# Früchte\n".encode("latin-1"))
    monkeypatch.chdir(project)
    monkeypatch.setattr("sys.argv", ["mergeflow", *command.split()])
    monkeypatch.setattr(cli, "app", typer.Typer(pretty_exceptions_enable=False))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "params.yaml is not UTF-8 text: byte 0xfc in line 2. Save the file as UTF-8." in capsys.readouterr().err
