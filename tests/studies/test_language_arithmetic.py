"""Study `language_arithmetic`, small: a drawn model of two layers, a few texts and steps; and what its texts are."""

import math

import pytest
import torch

from mergeflow.merging.catalog import methods
from studies.lab.analogies import ANALOGY, BASE, NEAREST, SINGLE, TRAINED, UNLABELLED
from studies.lab.rows import per_seed, select
from studies.lab.study import Result
from studies.language_arithmetic import (
    ATTRIBUTES,
    BEST,
    DOMAINS,
    INDIVIDUAL,
    JOINT,
    TREATING,
    Bench,
    Options,
    World,
    with_best,
)
from suites.books import words
from suites.books.manners import GENRES, Manner, documents
from tests.causal.small_project import make_base
from tests.studies.small_lab import ROOT, run_result

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
def result(base: str, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run_result(ROOT, "language_arithmetic", tmp_path_factory.mktemp("study"), base=base, **SMALL)


def test_the_small_study_is_judged_and_drawn(result: Result) -> None:
    assert [finding.system for finding in result.findings] == ["P22"] * 10 + ["B7"] * 4
    assert all("±" in finding.measured for finding in result.findings)
    assert (len(result.tables), len(result.notes), set(result.draw())) == (3, 1, {"targets", "domains"})


def test_every_task_is_reached_from_the_other_three(result: Result) -> None:
    rows = result.rows[result.rows.way.notna()]
    assert len(rows) == 2 * 8 * 9
    for _, group in rows.groupby(["seed", "attributes", "target"]):
        ways = group.set_index("way")
        assert ways.validation[NEAREST] == ways.validation[list(SINGLE)].max()
        assert ways.validation[ANALOGY] >= ways.validation[UNLABELLED]  # 1 is among the λ
        assert ways.test[TRAINED] > ways.test[BASE]


def test_an_analogy_is_the_sum_of_three_vectors_in_the_loss_of_transformers(base: str, result: Result) -> None:
    bench, tasks = Bench.open(Options.model_validate({**SMALL, "base": base}), 1), ATTRIBUTES["authors × genres"]
    a, b, c = (
        bench.tuned([tasks[task]]) for task in (("first", "dialogues"), ("second", "tales"), ("second", "dialogues"))
    )
    bench.model.load({name: start + (a[name] + b[name] - c[name] - start) for name, start in bench.start.items()})
    texts = bench.held_out[tasks["first", "tales"], "test"].blocks
    total, count = 0.0, 0
    for ids, length in zip(texts.ids, texts.lengths, strict=True):
        tokens = ids[None, :length].long()
        with torch.inference_mode():
            loss = bench.model.module.whole(input_ids=tokens, labels=tokens).loss
        total, count = total + float(loss) * (int(length) - 1), count + int(length) - 1
    (likelihood,) = select(result.rows, seed=1, target=TARGET, way=UNLABELLED).test
    assert likelihood == pytest.approx(-total / count, rel=1e-5)
    assert math.exp(-likelihood) > 1


def test_domains_are_held_against_their_own_experts_and_joint_training(result: Result) -> None:
    rows = result.rows[result.rows.model.notna()]
    means = per_seed(rows, "domain", "model", value="test")
    for domain in DOMAINS:
        for model in (INDIVIDUAL, JOINT):
            assert (means.loc[domain, model] > means.loc[domain, BASE]).all()
    scales = rows[rows.model.isin(list(methods()))].groupby("model").tried.unique()
    assert {model: list(tried) for model, tried in scales.items()} == {
        "average": [1],
        "task_arithmetic": [2],
        "ties": [1],
    }
    *_, domains = result.tables.values()
    assert set(domains.index) == {BASE, INDIVIDUAL, JOINT, BEST, "average", "task_arithmetic", "ties"}


def test_the_best_merge_is_chosen_on_validation() -> None:
    figures = {BASE: (0.0, 0.0), "average": (-2.0, -1.0), "task_arithmetic": (-1.0, -3.0), "ties": (-1.5, -2.0)}
    rows = with_best([{"seed": 1, "model": m, "validation": v, "test": t} for m, (v, t) in figures.items()])
    assert {row["model"]: row["test"] for row in rows if "method" in row} == {BEST: -3.0, TREATING: -2.0}


def test_a_method_that_is_not_in_the_catalog_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'ties'"):
        Options.model_validate({**SMALL, "methods": {"tie": {}}})


def test_texts_are_what_their_manner_says() -> None:
    def text(author: str, genre: str, tense: str = "past", split: str = "train", seed: int = 1) -> str:
        return "\n".join(documents(Manner(author, genre, tense), split, 6, seed))

    tales, dialogues = text("first", "tales"), text("first", "dialogues")
    assert [texts.count("Where is the") > 0 for texts in (tales, dialogues)] == [False, True]
    assert [texts.count("beside the") > 0 for texts in (tales, dialogues)] == [True, False]
    assert tales == text("first", "tales")
    assert tales not in {text("first", "tales", seed=2), text("first", "tales", split="test")}

    def cast(tale: str) -> set[str]:
        return {word for line in tale.split() if (word := line.strip('.,!?"')).istitle()}

    assert len(cast(tales) & cast(dialogues)) > len(cast(tales) & cast(text("second", "tales"))) + 5
    now = set(text("narrator", "narrative", "present").replace(".", "").replace(",", "").split())
    assert not now & {*words.ACTS, *words.MOODS, "was", "had", "ate"}
    assert {"is", "has", "eats"} <= now
    assert set(GENRES) == {manner.genre for manner in World.of(None).tasks if isinstance(manner, Manner)}
