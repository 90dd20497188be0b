"""Study `glue` (C5, C9): how do the merge methods compare on encoders of eight tasks on texts, each with a head?

**Question.** One expert per task, all of its encoder merged, its head kept: who leads? Does a merge lose in what the
encoder still tells, or in that the heads no longer read it? And should the embedding matrices be merged at all?

**Method.** Every method merges the same eight experts. Its scale is chosen on validation, walking a grid both ways
until the mean has fallen by one point; every combination of its other arguments is tried. CART's grid is the paper's,
ranks of 4 to 32 % and λ of 1 to 3; *wider grid* is CART chosen once more with smaller ones as well. Then one look at
test. Each task is judged by its figure (accuracy, F1, Matthews' or Pearson's correlation); the mean of the figures is
the paper's "Avg.". *Heads fixed*: those that were trained with the experts. *Heads probed*: the same merge, the heads
fitted to its features of the training examples, as the warm start of training fits them to the base's. *Embeddings of
the base*: the method's merge with the base's embeddings instead of the merged ones, its arguments chosen anew.
AdaMerging learns a coefficient per task and tensor from the entropy of unlabelled test batches, from task arithmetic as
chosen on validation and from CART as its paper has it, 8 % and λ = 1; its rate is chosen on validation, on the first
seed. Joint training sees every task in every step; MIMA merges and tunes in rounds; both have as many steps a task as
the experts, and heads of their own. Beside the merges the experts are compressed into one file and read back out of it,
by EMR and by CART-Indexing at 8 %; storage is the file with θ0 where that is needed, as a share of all experts' bytes.
± is over seeds: the order of the batches.

**Source.** CART, Table 2 (eight tasks of GLUE, RoBERTa-base): individual 85.6, CART 70.8, task arithmetic 66.7, TIES
64.0, average 51.3, in per cent; Table 4 (the same tasks, compressed); the further methods as in docs/methods.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydantic import Field, field_validator
from torch import Tensor

from mergeflow.evaluation.averages import mean
from mergeflow.evaluation.scoring import CandidateScorer
from mergeflow.merging import MethodCall
from mergeflow.search.candidates import Scored, best_on_line, grid_of, line, score_all
from mergeflow.search.candidates import grid as whole_grid
from studies.lab.adapting import CART_START, Adaptation, Direction, adapt, choose_rate
from studies.lab.compressing import measure as measure_compressed
from studies.lab.inputs import Laboratory, State
from studies.lab.sweeps import ADAPTED, Sweep, ranges_of
from studies.old.papers.glue.choices import tidy_rows
from studies.old.papers.glue.compressed import NAMES
from studies.old.papers.glue.heads import left_heads, probed_heads, trained_jointly
from studies.old.papers.glue.results import WIDER, figures, findings, notes, tables
from studies.old.pieces import grid, kept, kept_all
from studies.old.results import StudyResult
from studies.old.rows import Row
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO

EXPERTS = "experts"


class Adapting(Section):
    """AdaMerging. directions: what is scaled. rates: tried on validation. steps: of Adam."""

    directions: list[Direction]
    rates: list[float] = Field(min_length=1)
    steps: int = Field(ge=1)


class Options(Section):
    """The study's choices.

    methods: name in the catalog → what is tried. wider: what is tried of some of them once more. together: joint and
    iterative runs, with labels for readers. adapted: AdaMerging. probed: models whose heads are fitted once more.
    embeddings: what the names of embeddings contain, and the methods that are merged without them too. compressed:
    compressor → its arguments.
    """

    methods: dict[str, Sweep]
    wider: dict[str, Sweep] = Field(default_factory=dict)
    together: dict[str, str]
    adapted: Adapting
    probed: list[str]
    embeddings: dict[str, list[str]]
    compressed: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @field_validator("compressed")
    @classmethod
    def _known(cls, compressed: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if unknown := set(compressed) - set(NAMES):
            raise ValueError(f"expected {' or '.join(NAMES)}, found {', '.join(sorted(unknown))}")
        return compressed

    @property
    def merges(self) -> dict[str, Sweep]:
        """Model → what is tried of its method, whose name the model's begins with."""
        return {**self.methods, **{name + WIDER: sweep for name, sweep in self.wider.items()}}


DECLARED = Declaration(
    Options,
    runs=lambda options: [EXPERTS, *options.together],
    splits=("train", "validation", "test"),
    systems=("C5", "C9"),
)


def run(io: StageIO) -> None:
    """Write `outputs/studies/glue`."""
    inputs = Laboratory(io)
    options = DECLARED.chosen(io)
    first, *others = inputs.run(EXPERTS).seeds
    io.report("seeds", 0, 1 + len(others))
    measured = [measure(inputs, options, first)]  # it chooses AdaMerging's rates, which the others read
    measured += kept_all(io, {f"seed_{seed}": partial(measure, inputs, options, seed) for seed in others}, "seeds")
    rows = [row for one in measured for row in one["rows"]]
    result = StudyResult(
        tables(rows, options.together),
        findings(rows),
        notes(rows, options.together, tried(options)),
        tidy_rows(rows),
    )
    result.write(io, figures(rows, options.together))


def tried(options: Options) -> dict[str, dict[str, Sequence[float]]]:
    """Return model → argument → the values that are tried of it; of a scale the two ends."""
    merged = {model: ranges_of(sweep) for model, sweep in options.merges.items()}
    return {**merged, **{ADAPTED[on]: {"rate": options.adapted.rates} for on in options.adapted.directions}}


def measure(inputs: Laboratory, options: Options, seed: int) -> Row:
    """Return the rows of a seed as `rows`.

    Args:
        inputs: the study's inputs.
        options: its choices.
        seed: of the experts.
    """
    return {"rows": Bench.open(inputs, options, seed).measure()}


@dataclass(frozen=True)
class Bench:
    """The experts of one seed with their heads, and what merges and scores on validation; test is out of its reach."""

    inputs: Laboratory
    options: Options
    seed: int
    experts: Mapping[str, State]
    scorer: CandidateScorer

    @classmethod
    def open(cls, inputs: Laboratory, options: Options, seed: int) -> "Bench":
        """Return the bench of a seed.

        Args:
            inputs: the study's inputs.
            options: its choices.
            seed: of the experts.
        """
        experts = inputs.run(EXPERTS).experts(seed)
        inputs = inputs.with_heads(left_heads(inputs, EXPERTS, seed))
        scorer = inputs.blind().scorer(experts)
        ratios = [ratio for sweep in options.merges.values() for ratio in sweep.args.get("rank_ratio", [])]
        scorer.renew_cache(max([0.01, *ratios]))
        return cls(inputs, options, seed, experts, scorer)

    def measure(self) -> list[Row]:
        """Return a row for each model: seed, model, embeddings, figures per task with fixed and with probed heads."""
        measures: dict[tuple[str, str], Callable[[], Row]] = {
            ("base", "base"): lambda: self._looked_at("base", self.inputs.base, self.inputs),
            ("individual", "merged"): self._individual,
            **{(name, "merged"): partial(self._together, name) for name in self.options.together},
            **{(name, "merged"): partial(self._merged, name, "") for name in self.options.merges},
            **{(name, "own"): partial(self._compressed, name) for name in self.options.compressed},
        }
        for pattern, methods in self.options.embeddings.items():
            measures |= {(name, "base"): partial(self._merged, name, pattern) for name in methods}
        rows = {key: kept(self.inputs.io, f"{self.seed}_{'_'.join(key)}", one) for key, one in measures.items()}
        for on in self.options.adapted.directions:
            key = (ADAPTED[on], "merged")
            scale = rows["task_arithmetic", "merged"]["args"]["scale"] if on == "task_vectors" else CART_START
            rows[key] = kept(self.inputs.io, f"{self.seed}_{ADAPTED[on]}", partial(self._adapted, on, scale))
        return [{"seed": self.seed, "model": name, "embeddings": of, **row} for (name, of), row in rows.items()]

    def _looked_at(self, model: str, state: State, inputs: Laboratory) -> Row:
        """Look at test once, and once more with heads fitted to these features where that is asked for."""
        found = {"fixed": inputs.accuracy(state, "test")}
        if model in self.options.probed:
            found["probed"] = inputs.with_heads(probed_heads(inputs, state)).accuracy(state, "test")
        return found

    def _individual(self) -> Row:
        return {"fixed": self.inputs.individual(self.experts, "test")}

    def _compressed(self, name: str) -> Row:
        """Measure the experts as they are read out of one file; `stored`: its share of their bytes."""
        args = self.options.compressed[name]
        row = measure_compressed(self.inputs, dict(self.experts), name, args, ("test",))
        needed = row["file"] + (row["base"] if row["needs_base"] else 0)
        return {"fixed": row["test"], "stored": needed / row["all_experts"]}

    def _together(self, name: str) -> Row:
        """Measure the one model that a joint or an iterative run ends with, with its own heads."""
        run = self.inputs.run(name)
        joint = trained_jointly(self.inputs, name, self.seed)
        state = run.model(self.seed) if joint else run.merged(self.seed, len(run.rounds(self.seed)))
        return self._looked_at(name, state, self.inputs.with_heads(left_heads(self.inputs, name, self.seed)))

    def _merged(self, model: str, without: str) -> Row:
        """Choose a method's arguments on validation; tensors whose names contain `without` stay the base's."""

        def merge(call: MethodCall) -> dict[str, Tensor]:
            state = self.scorer.merge(call)
            return state | {name: value for name, value in self.inputs.base.items() if without and without in name}

        sweep, method = self.options.merges[model], model.removesuffix(WIDER)
        best, tried = choose(sweep, method, lambda call: self.scorer.state(merge(call)))
        chosen = {"args": best.varied, "tried": tried, "validation": mean(best.scores)}
        return {**self._looked_at(model, merge(best.call), self.inputs), **chosen}

    def _adapted(self, on: Direction, scale: float) -> Row:
        """Adapt a coefficient per task and tensor on unlabelled test examples, with the rate that validation chose."""
        choices = self.options.adapted
        plan = Adaptation(on, "layer", "test", init=scale, lr=choices.rates[0], steps=choices.steps)

        def choose_once() -> Row:
            assert self.seed == self.inputs.run(EXPERTS).seeds[0], "the first seed is measured first"
            every = max(choices.steps // 4, 1)
            return {"rows": choose_rate(self.inputs, self.experts, plan, choices.rates, every)}

        tried = kept(self.inputs.io, f"rates_{on}", choose_once)["rows"]
        made = adapt(self.inputs, self.experts, replace(plan, lr=tried[0]["lr"], seed=self.seed))
        chosen = {"args": {"rate": tried[0]["lr"]}, "tried_rates": tried}
        return {**self._looked_at(ADAPTED[on], made.state, self.inputs), **chosen}


def choose(sweep: Sweep, method: str, score: Callable[[MethodCall], Mapping[str, float]]) -> tuple[Scored, int]:
    """Return the best candidate of a method on validation, and how many were tried.

    Args:
        sweep: what is tried.
        method: a name of the catalog.
        score: a candidate to its figures per task.
    """
    if sweep.scale is None:
        found = list(score_all(method, whole_grid(method, sweep.args), score, mean))
        return max(found, key=lambda one: one.value), len(found)
    values, best, tried = grid(sweep.scale.low, sweep.scale.high, sweep.scale.step), list[Scored](), 0
    for args in grid_of(method, sweep.args):
        found = list(score_all(method, line("scale", values, sweep.scale.start, args), score, mean))
        best.append(best_on_line(found, "scale"))
        tried += len(found)
    return max(best, key=lambda one: one.value), tried
