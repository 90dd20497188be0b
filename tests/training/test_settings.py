"""Bad settings are refused with params.yaml, before anything is read or trained."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from mergeflow.errors import MergeflowError
from mergeflow.training.settings import FineTuneSettings, IterativeSettings, LoraSettings, Regime
from tasks.project.parameters import load_params

ROOT = Path(__file__).parents[2]


def message(folder: Path, **changes: Any) -> str:
    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    values["finetune"] |= changes
    (folder / "params.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(MergeflowError) as caught:
        load_params(folder / "params.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"regime": "iteratve"}, "finetune.regime: unknown regime 'iteratve': did you mean 'iterative'?"),
        ({"regime": 3}, "finetune.regime"),
        ({"regime": "iterative", "steps": 300, "iterative": {"rounds": 8}}, "set finetune.steps to 296 or 304, or"),
        ({"regime": "iterative", "steps": 4, "iterative": {"rounds": 8}}, "set finetune.steps to 8, or choose rounds"),
        ({"regime": "iterative", "iterative": {"rounds": 0}}, "finetune.iterative.rounds: must be at least 1"),
        ({"steps": 0}, "finetune.steps: must be at least 1, found 0"),
        ({"iterative": {"merge": "avrage"}}, "finetune.iterative: unknown method 'avrage': did you mean 'average'?"),
        ({"iterative": {"merge": "ties", "args": {"keeep": 1}}}, "unknown argument of ties 'keeep': did you mean"),
        ({"iterative": {"merge": "ties", "args": {"keep": 5}}}, "method 'ties': keep: must be at most 1"),
        ({"iterative": {"merge": "regmean"}}, "needs statistics of data (gram), which are not taken between rounds"),
        ({"iterative": {"round": 4}}, "unknown key of finetune.iterative 'round': did you mean 'rounds'?"),
        ({"lora": {"rank": 0}}, "finetune.lora.rank"),
        ({"lora": {"targets": []}}, "finetune.lora.targets"),
        ({"precision": "float16"}, "finetune.precision"),
    ],
)
def test_a_bad_setting_is_explained(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    assert expected in message(tmp_path, **changes)


@pytest.mark.parametrize("rounds", [1, 7, 300])
def test_one_epoch_per_round_fits_any_number_of_rounds(rounds: int) -> None:
    each = IterativeSettings(rounds=rounds, per_round="one_epoch")
    settings = FineTuneSettings(regime="iterative", steps=100, iterative=each)
    assert settings.steps_per_round(13) == 13
    assert settings.total_steps(13) == 13 * rounds


def test_the_page_has_every_regime_and_every_setting() -> None:
    page = (ROOT / "docs/training.md").read_text()
    rows = {line.split("|")[1].strip().strip("`") for line in page.splitlines() if line.startswith("| `")}
    assert set(get_args(Regime)) <= rows
    settings = {*FineTuneSettings.model_fields}
    settings |= {f"iterative.{name}" for name in IterativeSettings.model_fields}
    settings |= {f"lora.{name}" for name in LoraSettings.model_fields}
    assert settings - {"iterative", "lora"} <= rows
    for name in (rows & settings) - {"iterative", "lora"}:
        fields = {"iterative": IterativeSettings, "lora": LoraSettings}.get(name.partition(".")[0], FineTuneSettings)
        default = fields.model_fields[name.rpartition(".")[2]].get_default(call_default_factory=True)
        table = page.split("## Settings")[1].split("##")[0]
        row = next(line for line in table.splitlines() if line.startswith(f"| `{name}` |"))
        assert f"| `{json.dumps(default)}` |" in row, row


def test_the_page_has_every_column_of_the_trajectory() -> None:
    from dataclasses import fields

    from mergeflow.training import Cost, EpochRow

    page = (ROOT / "docs/training.md").read_text()
    for field in (*fields(EpochRow), *fields(Cost)):
        assert f"`{field.name}`" in page, field.name
