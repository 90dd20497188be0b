"""What the studies of the adviser on suites measure of one run's experts: λ by each way, and what unlearning costs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pydantic import Field
from torch import Tensor

from mergeflow.analysis.geometry import cosine_matrix, norm
from mergeflow.analysis.provable.answers import Answers
from mergeflow.analysis.provable.conditions import Interval
from mergeflow.analysis.provable.correlation import correlations, responses
from mergeflow.analysis.provable.questions import ask_all, one_each
from mergeflow.analysis.provable.ranges import scales_of_lengths, scales_of_theory
from mergeflow.evaluation.averages import draw_subsets, mean
from mergeflow.modalities.subset import Subset
from mergeflow.modality import Examples
from studies.lab.inputs import Laboratory, State
from studies.lab.regimes import regime_of
from studies.lab.scales import best_scale, combined, task_vector
from studies.old.papers.adviser.measuring import WAYS, part_of, range_columns, tried_scales
from studies.old.pieces import grid
from studies.old.rows import Row
from tasks.project.sections import Section

GRID = [*grid(0.05, 0.5, 0.05), *grid(0.6, 1.5, 0.1)]
RANGES = ("theory", "lengths")
_BATCH = 256


class Options(Section):
    """The choices of a study of the adviser.

    runs: whose experts. counts: the first so many tasks as whole suites; the largest is unlearned from. pairs, triples:
    drawn anew for each run and seed, of the tasks of the largest suite. samples: without labels, of each task.
    validation, test: images of each task with which λ is chosen and looked at. edited: test images of each task on
    which unlearning is measured.
    """

    runs: list[str] = Field(min_length=1)
    counts: list[int] = Field(min_length=1)
    pairs: int = Field(3, ge=0)
    triples: int = Field(3, ge=0)
    samples: int = Field(100, ge=8)
    validation: int = Field(80, ge=8)
    test: int = Field(100, ge=8)
    edited: int = Field(50, ge=8)


@dataclass(frozen=True)
class Suite:
    """The experts of one run and seed.

    Attributes:
        inputs: the study's inputs, of the tasks that count.
        start: what the experts were tuned from: θ0, or of a run in rounds what its last round began with.
        experts: weights by task.
    """

    inputs: Laboratory
    start: State
    experts: Mapping[str, State]

    @property
    def tasks(self) -> list[str]:
        """The tasks, in order."""
        return list(self.experts)

    @cached_property
    def vectors(self) -> dict[str, State]:
        """τ_t by task."""
        return {task: task_vector(state, self.start) for task, state in self.experts.items()}

    @cached_property
    def cosines(self) -> list[list[float]]:
        """Of all pairs of task vectors."""
        return cosine_matrix(list(self.vectors.values()))

    def merged(self, scales: Mapping[str, float]) -> dict[str, Tensor]:
        """Return the start plus Σ λ_t τ_t."""
        return combined(self.start, self.vectors, scales)

    def first(self, split: str, count: int) -> dict[str, Subset]:
        """Return the first examples of each task; test can be opened by inputs that are not blind alone.

        Args:
            split: train, validation or test.
            count: at most so many of each.
        """
        inputs = self.inputs if split == "test" else self.inputs.blind()
        return {task: Subset.first(inputs.examples(split)[task], count) for task in self.tasks}


def open_suite(inputs: Laboratory, run: str, seed: int) -> Suite:
    """Return the experts of a run.

    Args:
        inputs: the study's inputs, of the tasks that count.
        run: its name.
        seed: of the run.
    """
    found = inputs.run(run)
    iterative = regime_of(found, seed) == "iterative"
    return Suite(inputs, found.start(seed) if iterative else inputs.base, found.experts(seed))


def suite_rows(suite: Suite, options: Options, seed: int) -> list[Row]:
    """Return the rows of one run and seed: `set` of added tasks, and `edit` of tasks that are unlearned.

    Args:
        suite: the experts.
        options: the study's choices.
        seed: of the drawn pairs and triples and of Optuna.
    """
    asked = {task: one_each(one) for task, one in suite.first("validation", options.samples).items()}
    answers = ask_all(suite.inputs.model, suite.start, suite.experts, asked, _BATCH)
    changes = correlations(answers.changes).values
    drawn = [suite.tasks[:count] for count in options.counts]
    for size, count in ((2, options.pairs), (3, options.triples)):
        drawn += [list(one) for one in draw_subsets(suite.tasks, size, count, seed)] if count else []
    validation, test = suite.first("validation", options.validation), suite.first("test", options.test)
    rows = []
    for part in drawn:
        chosen = [suite.tasks.index(task) for task in part]
        ranges = {
            "theory": scales_of_theory(part_of(changes, chosen)),
            "lengths": scales_of_lengths([norm(suite.vectors[task]) for task in part], part_of(suite.cosines, chosen)),
        }
        rows.append(_set_row(part, ranges, _scorer(suite, part, validation), _scorer(suite, part, test), seed))
    return [*rows, *_edit_rows(suite, answers, suite.first("test", options.edited))]


def _scorer(suite: Suite, part: Sequence[str], examples: Mapping[str, Examples]) -> Callable[[float], float]:
    """Return mean accuracy over λ, in %, of the sum of some task vectors on their tasks; each λ is judged once."""
    known: dict[float, float] = {}
    scorer, judged = suite.inputs.scorer({}), {task: examples[task] for task in part}

    def score(scale: float) -> float:
        if scale not in known:
            known[scale] = 100 * mean(scorer.state(suite.merged(dict.fromkeys(part, scale)), judged))
        return known[scale]

    return score


def _set_row(
    part: Sequence[str],
    ranges: Mapping[str, Interval],
    validation: Callable[[float], float],
    test: Callable[[float], float],
    seed: int,
) -> Row:
    """Return what each way of choosing λ on validation gives; test is looked at once for each."""
    tried = tried_scales(GRID, ranges, validation, seed)
    row: Row = {"part": "set", "tasks": " ".join(part), "size": len(part)}
    for way in WAYS:
        best = best_scale(tried[way], validation)
        row |= {f"scale_{way}": best, f"tried_{way}": len(tried[way])}
        row |= {f"validation_{way}": validation(best), f"test_{way}": test(best)}
    return row | range_columns(ranges, row["scale_grid"])


def _edit_rows(suite: Suite, answers: Answers, test: Mapping[str, Examples]) -> list[Row]:
    """Return for each task what the others lose when its vector is taken away with −λ instead of left out with 0.

    λ is the middle of the range by the lengths of the whole suite, so that nothing is chosen here.
    """
    names, scorer = suite.tasks, suite.inputs.scorer({})
    lengths = scales_of_lengths([norm(vector) for vector in suite.vectors.values()], suite.cosines)
    if lengths.empty:
        return []
    scale = (lengths.low * lengths.high) ** 0.5
    alphas, changes = correlations(answers.experts).values, correlations(answers.changes).values
    moved = responses(answers.experts, answers.base)
    rows = []
    for j, forget in enumerate(names):
        left_out, negated = (
            scorer.state(suite.merged(dict.fromkeys(names, scale) | {forget: weight}), test) for weight in (0.0, -scale)
        )
        for i, keep in enumerate(names):
            if keep == forget:
                continue
            told = {"eq11": alphas[i][j], "changes": changes[i][j], "response": moved[i][j]}
            row = {"part": "edit", "keep": keep, "forget": forget, **told, "cosine": suite.cosines[i][j]}
            row |= {"scale": scale, "loss": 100 * (left_out[keep] - negated[keep])}
            rows.append(row | {"left_out": 100 * left_out[forget], "left": 100 * negated[forget]})
    return rows
