"""Study `language_arithmetic`, small: a drawn model of two layers, a few texts and steps; and what its texts are."""

import math
from pathlib import Path

import pytest
import torch
import yaml

from mergeflow.merging.catalog import methods
from studies.old.papers.analogy.results import ANALOGY, NEAREST, SINGLE, TRAINED
from studies.old.papers.language_arithmetic.figures import figures
from studies.old.papers.language_arithmetic.measuring import BASE, INDIVIDUAL, JOINT, Bench
from studies.old.papers.language_arithmetic.options import Options
from studies.old.papers.language_arithmetic.results import BEST, TREATING, domains, means, study_result
from studies.old.papers.language_arithmetic.texts import ATTRIBUTES, DOMAINS, GENRES, Manner, documents
from studies.old.papers.language_arithmetic.world import World
from studies.old.results import StudyResult
from studies.old.rows import Row
from suites.books import words
from tasks.plotting.drawing import to_svg
from tests.causal.small_project import make_base
from tests.causal.test_recipes import OTHERS
from tests.studies.small_lab import ROOT, run_study

SMALL = {
    "seeds": [1, 2],
    "block": 64,
    "train": 2,
    "validation": 1,
    "test": 1,
    "tune": {"learning_rate": 0.01, "steps": 4, "batch_size": 4},
    "scales": [0.5, 1.0],
    "methods": {"average": {}, "task_arithmetic": {"scale": [0.3, 1.0]}, "ties": {"scale": [0.5]}},
}
TARGET = "first tales"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_base(tmp_path_factory.mktemp("language_arithmetic") / "base"))


@pytest.fixture(scope="module")
def found(base: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StudyResult]:
    """The folder that the small study wrote, and what it says."""
    folder = run_study(ROOT, "language_arithmetic", tmp_path_factory.mktemp("study"), base=base, **SMALL)
    return folder, StudyResult.read(folder)


@pytest.mark.slow
def test_rows_alone_give_tables_findings_and_figures(found: tuple[Path, StudyResult]) -> None:
    folder, result = found
    again = study_result(result.rows)
    assert (again.findings, again.tables, again.notes, again.rows) == (
        result.findings,
        result.tables,
        result.notes,
        result.rows,
    )
    assert [finding.system for finding in result.findings] == ["P22"] * 10 + ["B7"] * 4
    assert all(finding.margin and "±" in finding.measured for finding in result.findings)
    for name, figure in figures(result.rows).items():
        assert to_svg(figure, name) == (folder / f"{name}.svg").read_bytes()


def test_every_task_is_reached_from_the_other_three(found: tuple[Path, StudyResult]) -> None:
    rows = [row for row in found[1].rows if row["way"]]
    assert len(rows) == 2 * 8 * 9
    for seed in SMALL["seeds"]:  # type: ignore[attr-defined]
        for name, tasks in ATTRIBUTES.items():
            for task in tasks:
                key = (seed, name, " ".join(task))
                ways = {row["way"]: row for row in rows if (row["seed"], row["attributes"], row["target"]) == key}
                assert ways[NEAREST]["validation"] == max(ways[way]["validation"] for way in SINGLE)
                assert ways[ANALOGY]["validation"] >= ways[f"{ANALOGY}, λ = 1"]["validation"]  # 1 is among the λ
                assert ways[TRAINED]["test"] > ways[BASE]["test"]


def test_an_analogy_is_the_sum_of_three_vectors_in_the_loss_of_transformers(
    base: str, found: tuple[Path, StudyResult]
) -> None:
    bench, tasks = Bench.open(Options.model_validate({**SMALL, "base": base}), 1), ATTRIBUTES["authors × genres"]
    a, b, c = (
        bench.tuned([tasks[task]]) for task in (("first", "dialogues"), ("second", "tales"), ("second", "dialogues"))
    )
    bench.model.load({name: start + (a[name] + b[name] - c[name] - start) for name, start in bench.start.items()})
    texts = bench.held_out[tasks["first", "tales"], "test"].blocks
    total, count = 0.0, 0
    for ids, length in zip(texts.ids, texts.lengths, strict=True):
        own = ids[None, :length].long()
        with torch.inference_mode():
            loss = bench.model.module.whole(input_ids=own, labels=own).loss
        total, count = total + float(loss) * (int(length) - 1), count + int(length) - 1
    (row,) = (
        row for row in found[1].rows if (row["seed"], row["target"], row["way"]) == (1, TARGET, f"{ANALOGY}, λ = 1")
    )
    assert row["test"] == pytest.approx(-total / count, rel=1e-5)
    assert math.exp(-row["test"]) > 1


def test_domains_are_held_against_their_own_experts_and_joint_training(found: tuple[Path, StudyResult]) -> None:
    rows = domains(found[1].rows)
    for domain in DOMAINS:
        for model in (INDIVIDUAL, JOINT):
            assert all(
                one > other for one, other in zip(means(rows, model, domain), means(rows, BASE, domain), strict=True)
            )
    tried = {row["model"]: row["tried"] for row in rows if row["model"] in methods()}
    assert tried == {"average": 1, "task_arithmetic": 2, "ties": 1}
    told = found[1].tables[-1].rows
    assert {row["model"] for row in told} == {BASE, INDIVIDUAL, JOINT, BEST, *SMALL["methods"]}  # type: ignore[misc]


def domain_row(seed: int, model: str, validation: float, test: float) -> Row:
    return {"seed": seed, "model": model, "domain": "tales", "validation": validation, "test": test, "args": "{}"}


def test_the_best_merge_is_chosen_on_validation() -> None:
    rows = [
        domain_row(1, BASE, 0.0, 0.0),
        domain_row(1, "average", -2.0, -1.0),
        domain_row(1, "task_arithmetic", -1.0, -3.0),
        domain_row(1, "ties", -1.5, -2.0),
    ]
    found = domains(rows)
    assert (means(found, BEST), means(found, TREATING)) == ([-3.0], [-2.0])


def test_all_methods_that_need_no_data_are_chosen_in_the_project() -> None:
    values = yaml.safe_load((ROOT / "studies/params.yaml").read_text())["studies"]["language_arithmetic"]
    later = {"row_prune"}  # in the catalog since the study was recorded; it joins when that is done again
    assert set(Options.model_validate(values).methods) == set(methods()) - OTHERS - later
    with pytest.raises(ValueError, match="did you mean 'ties'"):
        Options.model_validate({**values, "methods": {"tie": {}}})


def test_texts_are_what_their_manner_says() -> None:
    def text(author: str, genre: str, tense: str = "past", split: str = "train", seed: int = 1) -> str:
        return "\n".join(documents(Manner(author, genre, tense), split, 6, seed))

    tales, dialogues = text("first", "tales"), text("first", "dialogues")
    assert [told.count("Where is the") > 0 for told in (tales, dialogues)] == [False, True]
    assert [told.count("beside the") > 0 for told in (tales, dialogues)] == [True, False]
    assert tales == text("first", "tales")
    assert tales not in {text("first", "tales", seed=2), text("first", "tales", split="test")}

    def cast(told: str) -> set[str]:
        return {word for line in told.split() if (word := line.strip('.,!?"')).istitle()}

    assert len(cast(tales) & cast(dialogues)) > len(cast(tales) & cast(text("second", "tales"))) + 5
    now = set(text("narrator", "narrative", "present").replace(".", "").replace(",", "").split())
    assert not now & {*words.ACTS, *words.MOODS, "was", "had", "ate"}
    assert {"is", "has", "eats"} <= now
    assert set(GENRES) == {manner.genre for manner in World.of(None).tasks if isinstance(manner, Manner)}
