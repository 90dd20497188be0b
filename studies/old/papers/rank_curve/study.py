"""Study `rank_curve` (C2): how good is the merge when only part of each task vector's rank is kept?

**Question.** Keep the k leading singular directions of every task vector and add them up. What does k / r do, for task
vectors centred at the experts' mean and for the original ones?

**Method.** For every matrix of attention and MLP, k = ceil(ratio · r) with r its smaller side,

    centred (`cart`):      θ̄ + λ Σ_t SVD_k(θ_t − θ̄),    θ̄ = mean θ_t
    original (`low_rank`): θ0 + λ Σ_t SVD_k(θ_t − θ0);

all other tensors are averaged or added with λ. A third curve, *matrices alone*, is the original one with all other
tensors left as they are in θ0: like the paper's it begins at the pre-trained model. At ratio 0 the centred merge is the
average, at 1 it is the average whatever λ is, since the centred task vectors add up to 0; the original one ends in task
arithmetic. These ends are identities, which only a mistake can break. λ is chosen on validation, in two ways: *once*,
at the ratio where a method is used (0.08 for centred, 1 for original), then fixed over all ranks as in the paper's
Figures 1 and 6; and *per rank*, where the largest ratio or λ that is tried, if it is taken, is no peak. Test is looked
at once for each point drawn. What is called a peak is that of the test curve, a description of the curve and not a
choice; bell and lead are judged at 8 % as well, which was fixed before. ± is over seeds: the order of the batches.

**Source.** CART, Section 4.1, equation 4, Figures 1, 6 and 10.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pydantic import Field, ValidationInfo, field_validator

from mergeflow.evaluation.scoring import CandidateScorer
from mergeflow.merging import configure
from mergeflow.merging.matrices import is_matrix
from studies.lab.inputs import Accuracy, Laboratory, State
from studies.old.papers.rank_curve.figures import mean_figure, task_figure
from studies.old.papers.rank_curve.findings import findings
from studies.old.papers.rank_curve.results import USED, notes, tables, tidy_rows
from studies.old.pieces import choose_scale, kept, kept_all
from studies.old.results import StudyResult
from studies.old.rows import Row
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO

METHODS = {"centred": "cart", "original": "low_rank", "matrices alone": "low_rank"}
ALONE = "matrices alone"
USED_AT = {"centred": USED, "original": 1.0}


class Suite(Section):
    """The first `tasks` tasks. `ratios`: of the curve, from 0 to 1. `tuned`: those whose λ is also chosen per rank."""

    tasks: int = Field(ge=2)
    ratios: list[float] = Field(min_length=3)
    tuned: list[float] = Field(min_length=1)

    @field_validator("ratios", "tuned")
    @classmethod
    def _ascending(cls, ratios: list[float], info: ValidationInfo) -> list[float]:
        if ratios != sorted(set(ratios)):
            raise ValueError(f"{info.field_name} must ascend, found {ratios}")
        if info.field_name == "ratios" and (ratios[0], ratios[-1]) != (0, 1):
            raise ValueError(f"ratios go from 0 to 1, found {ratios[0]:g} to {ratios[-1]:g}")
        if info.field_name == "ratios" and USED not in ratios:
            raise ValueError(
                f"ratios need {USED:g}, at which the paper uses CART and the study compares, found {ratios}"
            )
        if info.field_name == "tuned" and not 0 < ratios[0] <= ratios[-1] <= 1:
            raise ValueError(f"tuned lie in (0, 1], found {ratios[0]:g} to {ratios[-1]:g}")
        return ratios


class Options(Section):
    """The study's choices. `run`: whose experts. `scales`: the λ tried, ascending, for `centred` and `original`."""

    run: str
    suites: list[Suite] = Field(min_length=1)
    scales: dict[str, list[float]]


DECLARED = Declaration(Options, runs=lambda options: [options.run], splits=("validation", "test"), systems=("C2",))


def run(io: StageIO) -> None:
    """Write `outputs/studies/rank_curve`."""
    inputs = Laboratory(io)
    options = DECLARED.chosen(io)
    measures = {
        f"{suite.tasks}_{seed}": partial(measure, inputs, options, suite, seed)
        for suite in options.suites
        for seed in inputs.run(options.run).seeds
    }
    rows = kept_all(io, measures, "suites and seeds")
    result = StudyResult(tables(rows), findings(rows), notes(rows), tidy_rows(rows))
    drawn = {f"mean_{suite.tasks}": mean_figure(_of(rows, suite.tasks)) for suite in options.suites}
    drawn |= {f"tasks_{suite.tasks}": task_figure(_of(rows, suite.tasks)) for suite in options.suites}
    result.write(io, drawn)


def _of(rows: Sequence[Row], count: int) -> list[Row]:
    return [row for row in rows if row["tasks"] == count]


def measure(inputs: Laboratory, options: Options, suite: Suite, seed: int) -> Row:
    """Return the curves of one suite and seed: `curves` kind → rule (`once`, `per rank`) → points, and the levels.

    Args:
        inputs: the study's inputs.
        options: its choices.
        suite: how many tasks, and which ratios.
        seed: of the experts.
    """
    part = inputs.first(suite.tasks)
    experts = part.run(options.run).experts(seed)
    walk = Walk(part, part.blind().scorer(experts), options.scales)
    curves = {kind: walk.curves(kind, suite) for kind in USED_AT}
    scale = float(curves["original"]["once"][-1]["scale"])
    curves[ALONE] = {"once": [walk.point(ALONE, ratio, scale) for ratio in suite.ratios], "per rank": []}
    return {
        "tasks": suite.tasks,
        "seed": seed,
        "curves": curves,
        "tried": {kind: [min(scales), max(scales)] for kind, scales in options.scales.items()},
        "average": part.accuracy(walk.scorer.merge(configure("average")), "test"),
        "experts": part.individual(experts, "test"),
        "zero_shot": kept(part.io, f"zero_shot_{suite.tasks}", partial(part.accuracy, part.base, "test")),
    }


@dataclass
class Walk:
    """Points of the curves of one suite and seed; every matrix is factored once per kind.

    Attributes:
        inputs: the suite's.
        scorer: of its experts.
        scales: the λ tried, kind → ascending.
    """

    inputs: Laboratory
    scorer: CandidateScorer
    scales: Mapping[str, Sequence[float]]
    _seen: dict[tuple[str, float, float], Accuracy] = field(default_factory=dict)

    def curves(self, kind: str, suite: Suite) -> dict[str, list[Row]]:
        """Return the points with λ chosen once, and those with λ chosen per rank, walking from rank to rank."""
        usual = {"centred": 1.4, "original": 2.4 / suite.tasks}
        start = self.choose(kind, USED_AT[kind], usual[kind])
        once = [self.point(kind, ratio, start) for ratio in suite.ratios]
        per_rank, scale = [], start
        for ratio in sorted(suite.tuned, reverse=kind == "original"):
            scale = start if ratio == USED_AT[kind] else self.choose(kind, ratio, scale)
            per_rank.append(self.point(kind, ratio, scale))
        self.scorer.renew_cache(1.0)  # the other kind has other matrices
        return {"once": once, "per rank": sorted(per_rank, key=lambda point: float(point["ratio"]))}

    def choose(self, kind: str, ratio: float, start: float) -> float:
        """Return the λ that is best on validation at a ratio > 0.

        Args:
            kind: a key of `METHODS`.
            ratio: rank ratio, > 0.
            start: where the walk over the scales begins.
        """
        args = {"rank_ratio": ratio}
        chosen = choose_scale(self.inputs, self.scorer, METHODS[kind], self.scales[kind], start, args, test=False)
        return float(chosen.args["scale"])

    def point(self, kind: str, ratio: float, scale: float) -> Row:
        """Return a point of a curve with its test accuracy per task; the same point is looked at once.

        Args:
            kind: a key of `METHODS`.
            ratio: rank ratio, 0 … 1.
            scale: λ.
        """
        key = (kind, ratio, scale)
        if key not in self._seen:
            self._seen[key] = self.inputs.accuracy(self.merged(kind, ratio, scale), "test")
        return {"ratio": ratio, "scale": scale, "test": self._seen[key]}

    def merged(self, kind: str, ratio: float, scale: float) -> State:
        """Return the merge; at ratio 0 no part of a treated matrix is added.

        Args:
            kind: a key of `METHODS`.
            ratio: rank ratio, 0 … 1.
            scale: λ.
        """
        call = configure(METHODS[kind], {"rank_ratio": ratio or 1.0, "scale": scale})
        state, treated = self.scorer.merge(call), call.args["matrices"]
        matrices = {name for name, tensor in state.items() if is_matrix(name, tensor.shape, treated)}
        if kind == ALONE:
            return {name: state[name] if ratio > 0 and name in matrices else self.inputs.base[name] for name in state}
        if ratio > 0:
            return state
        anchor = self.inputs.base if kind == "original" else self.scorer.merge(configure("average"))
        return {name: anchor[name] if name in matrices else tensor for name, tensor in state.items()}
