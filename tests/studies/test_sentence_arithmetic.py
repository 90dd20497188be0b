"""Study `sentence_arithmetic`, small: a drawn encoder of one layer, a few texts and steps; and what its texts are."""

import math
import re
import shutil
from dataclasses import replace

import pytest
import torch
import yaml

from mergeflow.modalities.text.tokenizer import ASSETS
from mergeflow.modality import State
from studies.lab.analogies import ANALOGY, BASE, UNLABELLED
from studies.lab.rows import Row, select
from studies.lab.study import Result
from studies.sentence_arithmetic import (
    ADDED,
    ADDITION,
    AFTER,
    ANALOGIES,
    BEFORE,
    FITTED,
    JOINT,
    NEGATION,
    TRAINED_HEADS,
    Bench,
    Options,
    Weights,
    as_long,
    bench_rows,
    named,
)
from suites.sentences.crossed import ACCEPTABILITY, CROSSED, NEITHER, SENTIMENT, TARGET, Name
from suites.sentences.reviews import ASPECTS, BAD, GOOD, SUBJECTS
from suites.sentences.suite import home
from suites.sentences.vocabulary import word_groups
from suites.sentences.words import PEOPLE
from tests.studies.small_lab import ROOT, run_result

SMALL = {
    "seeds": [1, 2],
    "train": 48,
    "validation": 20,
    "test": 20,
    "tune": {"learning_rate": 0.005, "steps": 6, "batch_size": 8},
    "scales": [0.5, 1.0],
    "negated": [0.5, 1.0, 2.0],
}
OPTIONS = Options.model_validate(SMALL)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A drawn encoder that knows the words of the suite."""
    from transformers import BertConfig, BertModel

    folder = shutil.copytree(ASSETS / "sentences8", tmp_path_factory.mktemp("sentence_arithmetic") / "base")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertModel(BertConfig(vocab_size=320, max_position_embeddings=64, **sizes)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def result(base: str, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run_result(ROOT, "sentence_arithmetic", tmp_path_factory.mktemp("study"), base=base, **SMALL)


@pytest.mark.slow
def test_the_small_study_is_judged_and_drawn(result: Result) -> None:
    assert {finding.system for finding in result.findings} == {"P22"}
    assert all(finding.ours for finding in result.findings)
    assert all("±" in finding.measured for finding in result.findings)
    assert (len(result.tables), set(result.draw())) == (3, {"addition", "negation", "analogy"})


@pytest.mark.slow
def test_scales_are_chosen_on_validation(result: Result) -> None:
    for seed in OPTIONS.seeds:
        rows = select(result.rows, seed=seed)
        best, plain = (select(rows, part=ANALOGIES, way=way).set_index("task") for way in (ANALOGY, UNLABELLED))
        assert list(best.index) == list(plain.index) == [named(TARGET)]
        assert best.validation[named(TARGET)] >= plain.validation[named(TARGET)]  # 1 is among the λ
        for start, heads in ((BASE, FITTED), (JOINT, TRAINED_HEADS)):
            negated = select(rows, part=NEGATION, start=start, heads=heads)
            before, after = (select(negated, way=way).set_index("task").validation for way in (BEFORE, AFTER))
            assert after[named(SENTIMENT)] >= before[named(SENTIMENT)] - 2
            assert abs(after[named(ACCEPTABILITY)]) <= abs(before[named(ACCEPTABILITY)])


class SmoothBench(Bench):
    """A bench whose figure is exp(−loss) in %: it tells two models apart however little they were trained."""

    def figure(self, state: State, head: Weights, task: Name, split: str) -> float:
        super().figure(state, head, task, split)  # puts both in place
        with torch.inference_mode():
            data = self.texts[task, split]
            return 100 * math.exp(-float(data.loss(self.model, torch.arange(len(data)))))


@pytest.mark.slow
def test_a_wrong_sign_would_be_seen(base: str) -> None:
    """Every sum is made once more from the experts; with the sign of its last vector turned it is another model."""
    options = OPTIONS.model_copy(update={"base": base})
    rows = list(bench_rows(SmoothBench.open(options, 1)))
    bench = SmoothBench.open(options, 1)
    tuned = {task: bench.tuned([task]) for task in (ACCEPTABILITY, SENTIMENT, NEITHER)}
    joint = bench.tuned([SENTIMENT, ACCEPTABILITY])

    def check(way: Row, start: State, signs: dict[Name, float], head: Weights, task: Name) -> None:
        """The row's figure is that of start + Σ sign (θ_task − θ_0), and not with the last sign turned."""
        last = list(signs)[-1]
        for turned in (1, -1):
            state = {name: value.clone() for name, value in start.items()}
            for tuned_task, sign in signs.items():
                for name, value in tuned[tuned_task].state.items():
                    state[name] += (turned if tuned_task == last else 1) * sign * (value - bench.start[name])
            same = bench.figure(state, head, task, "test") == pytest.approx(way["test"], rel=1e-4)
            assert same == (turned == 1)

    def row_of(task: Name, **wanted: object) -> Row:
        (match,) = (
            row
            for row in rows
            if row["task"] == named(task) and all(row.get(name) == value for name, value in wanted.items())
        )
        return match

    way = row_of(TARGET, part=ANALOGIES, way=UNLABELLED)
    signs = {ACCEPTABILITY: 1.0, SENTIMENT: 1.0, NEITHER: -1.0}
    check(way, bench.start, signs, tuned[ACCEPTABILITY].heads[ACCEPTABILITY], TARGET)
    for task in (SENTIMENT, ACCEPTABILITY):
        way = row_of(task, part=ADDITION, way=ADDED, heads=TRAINED_HEADS)
        check(way, bench.start, {SENTIMENT: 1.0, ACCEPTABILITY: way["scale"]}, tuned[task].heads[task], task)
        way = row_of(task, part=NEGATION, start=JOINT, way=AFTER, heads=TRAINED_HEADS)
        assert way["scale"] > 0
        check(way, joint.state, {ACCEPTABILITY: -way["scale"]}, joint.heads[task], task)


def test_a_random_vector_is_as_long_in_every_tensor() -> None:
    vector = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2, 2)}
    drawn = as_long(vector, 0)
    assert float(drawn["a"].norm()) == pytest.approx(5)
    assert not drawn["b"].any()
    assert drawn["a"].tolist() != as_long(vector, 1)["a"].tolist()


JUDGED = (
    rf"the (?:(?:{'|'.join(ASPECTS)}) of the )?(?:{'|'.join(SUBJECTS)}) was "
    rf"(?:(?:very|quite|rather|really|not|hardly|never|far from) )?(?:{'|'.join((*BAD, *GOOD))})"
)
SAID = rf"(?:(?:{'|'.join(name for names in PEOPLE for name in names)}) said that )?"
REVIEW = re.compile(rf"{SAID}(?:although {JUDGED}, {JUDGED}|{JUDGED}(?: (?:but|and|even though) {JUDGED})?)")


def praises(clause: str) -> bool:
    (adjective,) = (word for word in re.findall(r"\w+", clause) if word in (*BAD, *GOOD))
    return (adjective in GOOD) != bool(re.search(r"\b(not|hardly|never|far from)\b", clause))


def test_labels_are_true_of_the_words() -> None:
    reviews, events = (
        replace(CROSSED[name], counts={"validation": 100}).rows("validation", 3) for name in (TARGET, NEITHER)
    )
    assert all(bool(REVIEW.fullmatch(review.text)) == review.label for review in reviews)
    for event in events:
        whole = event.text.partition(" said that ")[2] or event.text
        counts = whole.partition(", ")[2] if whole.startswith("although") else whole.partition(" even though ")[0]
        for clause in counts.rpartition(" but ")[2].split(" and "):
            assert praises(clause) == event.label
        assert not set(re.findall(r"\w+", whole)) & set(SUBJECTS)
    vocabulary = {word for group in word_groups() for word in group}
    texts = [row.text for row in (*reviews, *events)]
    assert {word for text in texts for word in re.findall(r"\w+", text)} <= vocabulary
    assert {home(text) for text in texts} == {"validation"}
    assert len(set(texts)) == len(texts)


def test_the_choices_of_the_project_are_valid_and_their_seeds_are_no_others() -> None:
    values = yaml.safe_load((ROOT / "studies/params.yaml").read_text())["studies"]["sentence_arithmetic"]
    assert not set(Options.model_validate(values).seeds) & {0, 1, 11, 20}  # of the suite's making, and of what ships
