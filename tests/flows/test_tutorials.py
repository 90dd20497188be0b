"""The two tutorials, followed from their text: files are written as they stand there, commands run in order."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mergeflow.cli import main
from tests.flows.runbook import read_blocks
from tests.flows.small_project import ROOT
from tests.flows.test_operations import follow

MERGER = ROOT / "docs/merge-tutorial.md"
TEAM = ROOT / "docs/projects.md"


def written(language: str) -> list[str]:
    steps = MERGER.read_text(encoding="utf-8").partition("## Real models")[0]  # those need the hub
    return re.findall(rf"```{language}\n(.*?)```", steps, re.DOTALL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_merger_goes_from_two_fine_tunes_to_a_merge_to_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for names, language in ((("models.py", "scorers.py"), "python"), (("recipe.yaml", "sweep.yaml"), "yaml")):
        for name, text in zip(names, written(language), strict=True):
            Path(name).write_text(text)
    sweeps, shown = 0, ""
    for block in written("console"):
        for line in block.splitlines():
            program, *words = shlex.split(line)
            monkeypatch.setattr(sys, "argv", [program, *words])
            if program == "echo":
                subprocess.run(line, shell=True, check=True)
                continue
            if program == "python":
                runpy.run_path(words[0], run_name="__main__")
                continue
            with pytest.raises(SystemExit) as done:
                main()
            output, errors = capsys.readouterr()
            shown += output
            assert not done.value.code, f"{line}\n{errors}"
            if words[0] == "sweep":  # the grid may be widened until test is looked at
                sweeps += 1
                assert ("On test, looked at once" in output) == (sweeps == 2), output
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained("best").config.num_hidden_layers == 2
    assert "memory" in shown
    assert "* " in shown  # the sweep's winner
    sys.modules.pop("models", None)


@pytest.mark.nightly
def test_a_team_goes_from_an_empty_folder_to_a_rollback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = ""
    for block in read_blocks({}, TEAM):
        for words in block.commands if block.how in ("run", "refused") else []:
            if words[0] == "cd":
                monkeypatch.chdir(words[1])
                continue
            status, output = follow(Path.cwd(), words)
            assert status == (block.how == "refused"), f"{' '.join(words)}\n{output}"
            shown += output
    history = re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d +(\w+) ", shown, re.MULTILINE)
    assert history == ["promote", "force", "rollback"]
