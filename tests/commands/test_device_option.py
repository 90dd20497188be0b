"""The option --device: what is not there, or is not a device, is told in one message before any work."""

from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from mergeflow import cli
from mergeflow.commands import language, merging, statistics
from mergeflow.commands.options import checked
from mergeflow.errors import MergeflowError
from tests.card import driver

STATISTIC = ["expert", "--task", "t", "--architecture", "pocket-clip", "--out", "o.safetensors", "--device"]
COMMANDS = {
    "fisher": ["statistics", "fisher", *STATISTIC],
    "gram": ["statistics", "gram", *STATISTIC],
    "perplexity": ["perplexity", "model", "--device"],
    "check": ["check", "recipe.yaml", "--device"],
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_every_command_asks(words: list[str]) -> None:
    app = typer.Typer()
    for family in (statistics, language, merging):
        family.add_commands(app)
    done = CliRunner().invoke(app, [*words, "gpu"])
    assert isinstance(done.exception, MergeflowError)
    assert str(done.exception) == "--device is 'gpu', expected cpu, cuda or one such as cuda:1."


@pytest.mark.parametrize("name", ["gpu", "mps", "cuda:x", "CUDA", "cuda:", "cuda:-1", "0"])
def test_what_is_not_a_device(name: str) -> None:
    with pytest.raises(MergeflowError, match="expected cpu, cuda or one such as cuda:1"):
        checked(name)


def test_a_part_of_a_card_is_chosen_by_the_environment() -> None:
    with pytest.raises(MergeflowError, match="CUDA_VISIBLE_DEVICES=MIG-4f2-1, and is then --device cuda"):
        checked("MIG-4f2-1")


def test_devices_that_are_there() -> None:
    with driver(count=2):
        assert [checked(name) for name in ("cuda", "cuda:1", "auto", None)] == ["cuda", "cuda:1", "auto", None]
        with pytest.raises(MergeflowError, match="'cuda:2', but torch sees 2 CUDA devices, from cuda:0 on"):
            checked("cuda:2")


@pytest.mark.parametrize(
    ("built", "shown", "expected"),
    [
        (None, None, "is built without CUDA; install a build with it"),
        ("13.0", None, "is built for CUDA 13.0; `nvidia-smi` must show a card"),
        ("13.0", "", "CUDA_VISIBLE_DEVICES is '', which may hide it"),
    ],
)
def test_why_there_is_none(monkeypatch: pytest.MonkeyPatch, built: Any, shown: Any, expected: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    with pytest.raises(MergeflowError, match=expected):
        checked("cuda")


def test_memory_that_ran_out_is_told_in_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(**_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore words")

    monkeypatch.setattr(cli, "app", run)
    monkeypatch.setattr(cli, "add_all_commands", lambda start: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(
        "error: the device has too little memory: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert "more words" not in printed
