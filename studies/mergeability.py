"""Studies `mergeability`, `mergeability_suites` (L1): does the linearity of features foretell what merges lose?

**Question.** Cross-task linearity is offered as the reason why averaging weights works. Then pairs of experts whose
features are less linear should lose more when they are averaged. Do they, and more reliably so than what anyone
computes from the weights alone: of eight tasks tuned in six ways (`mergeability`), and with another base on suites of
8, 14 and 20 tasks (`mergeability_suites`)?

**Method.** All pairs of the project's experts, of several ways of training. *Loss of merging*: the experts' accuracies
on their own tests less those of ½θ_i + ½θ_j, mean of the two tasks. *Predictions*, none of which sees a label:

    CTL error       mean over samples of ‖f − g‖² / ‖g‖², f = f(½θ_i + ½θ_j), g = ½f(θ_i) + ½f(θ_j): of the last
                    block, the mean and the largest of all blocks; validation images of both tasks
    cosine          of τ_i and τ_j, negated: the nearer to orthogonal, the less loss is expected of the more similar
    distance        ‖θ_i − θ_j‖
    sign conflict   Σ_k min(|τ_ik|, |τ_jk|) [τ_ik τ_jk < 0] / Σ_k min(|τ_ik|, |τ_jk|)

A prediction is as good as its rank correlation (Spearman) with the loss over all pairs of one way of training; the mean
over the ways is judged, ± is over seeds. *Across*: the same over the pairs of all ways together. *Rounds*: the CTL
error of the last block, mean of all pairs, of the last experts of merge-and-tune over N rounds. *Linearised* experts
are networks in the tangent space of the base, and so are their averages; what they make as ordinary nets is beside it.
Their features are linear to rounding and rank nothing, which counts as a correlation of 0.

*Suites*: the 28 pairs of the first 8 tasks and the 91 of the first 14 are among the 190 of all 20, so that each pair is
merged once. Nothing is chosen here: the prediction by which `mergeflow linearity` answers is chosen on the record of
mergeability alone, and this is the other world that it is tried on. Rules were written before the first run.

*The command's prediction* is the one with the highest mean rank correlation over seeds, within ways of training; where
one that needs the weights alone is at most 0.05 behind, the margin of the study, that one: it needs no samples. What
was chosen stands in the command; a test chooses again from the record.

**Source.** Ours, beyond Zhou et al. 2024; sign conflicts: Yadav et al. 2023, TIES-Merging, Section 3; suites: Choi et
al. 2025 (CART), Section 5.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from operator import itemgetter
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor, nn

from mergeflow import layout
from mergeflow.analysis.geometry import dot, norm
from mergeflow.linearity.affine import Combination, Featured, affine, combine
from mergeflow.linearity.layers import find_layers
from mergeflow.modalities.classification import Subset
from mergeflow.modality import Model, device_of
from mergeflow.training import LinearisedModel
from mergeflow.training.linearised import LinearisedModule
from studies.lab import Claim, Laboratory, Row, Section, Study, curves
from studies.lab.claims import Samples, with_interval
from studies.lab.inputs import State, regime_of
from studies.lab.plots import scatter, side_by_side
from studies.lab.rows import paired, per_seed, rank_correlation, select, steps
from studies.lab.tuning import task_vector
from tasks.models import load_model, modality_of

# Linearised experts judged as what they are: the base's first-order Taylor expansion, with its features


def in_tangent_space(inputs: Laboratory) -> Laboratory:
    """Return the same with weights loaded into the base's expansion at θ0, of which experts `linearised` are weights.

    Args:
        inputs: the study's; they stay as they are.
    """
    fresh = load_model(inputs.io, layout.BASE_MODEL, inputs.device)
    tower = modality_of(inputs.io).tower(inputs.io.section("model"))
    return inputs.changed(model=LinearisedModel.of(fresh, tower), _judged={})


@dataclass(frozen=True)
class TangentFeatures:
    """Features of the expansion: f^ℓ(x; θ0) + ∇_θ f^ℓ(x; θ0)ᵀ (θ − θ0) at every layer ℓ, linear in θ − θ0."""

    examples: Featured

    def __len__(self) -> int:
        return len(self.examples)

    @torch.no_grad()
    def features(self, model: Model, rows: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return them for `rows`, [n, d] each.

        Args:
            model: a LinearisedModel, whose base has the weights θ0.
            rows: int64 [n].
            layers: names of the base's submodules.
        """
        assert isinstance(model, LinearisedModel)
        look = _Look(self.examples, model.base, layers)
        expansion = LinearisedModule(look).to(device_of(model))
        _load(expansion, model.state())
        flat: Tensor = expansion(rows)
        return dict(zip(layers, flat.split(look.widths, dim=1), strict=True))


class _Look(nn.Module):
    """A module that gives the features of all layers beside each other, [n, Σ d]."""

    def __init__(self, examples: Featured, model: Model, layers: Sequence[str]) -> None:
        super().__init__()
        self.module = model.module
        self.widths: list[int] = []
        self._look: Any = lambda rows: examples.features(model, rows, layers)

    def forward(self, rows: Tensor) -> Tensor:
        features = [value.flatten(1) for value in self._look(rows).values()]
        self.widths = [value.shape[1] for value in features]
        return torch.cat(features, dim=1)


def _load(expansion: LinearisedModule, state: Mapping[str, Tensor]) -> None:
    for name, weight in expansion.trained().items():
        weight.copy_(state[name.removeprefix("module.")])


ROUNDING = 1e-10  # a squared relative error that float32's arithmetic makes of features that are linear
RANKS, BETTER, ACROSS = 0.5, 0.05, 0.7  # rank correlations, and by how much one is better than another
LAST, COSINE, DISTANCE, CONFLICT = "CTL error, last block", "cosine of task vectors", "distance", "sign conflict"
OF_WEIGHTS = (COSINE, DISTANCE, CONFLICT)
PREDICTIONS = (LAST, "CTL error, mean of the blocks", "CTL error, largest of the blocks", *OF_WEIGHTS)


class Options(Section):
    runs: dict[str, str] = Field(min_length=1)  # run → label, each with one expert a task
    rounds: list[int]  # N of `mima_N`; none where nothing is tuned in rounds, as with experts that somebody published
    images: int = Field(ge=32)  # of each task's validation

    @property
    def iterative(self) -> dict[int, str]:
        """N → run."""
        return {number: f"mima_{number}" for number in self.rounds}

    @property
    def all_runs(self) -> list[str]:
        return list(dict.fromkeys([*self.runs, *self.iterative.values()]))


class SuiteOptions(Options):
    """The choices of mergeability, of which `rounds` is not asked here. counts: the first so many tasks, as suites."""

    rounds: list[int] = Field([], max_length=0)
    counts: list[int] = Field(min_length=1)


def as_nets(run: str) -> str:
    """Return the run's name in rows of linearised experts that are judged as ordinary nets."""
    return f"{run} as ordinary nets"


def measure(lab: Laboratory, options: Options) -> list[Row]:
    """Return for each pair of a run's experts the loss of merging and what predicts it."""
    return lab.by_run(options.all_runs, partial(measure_run, images=options.images))


def measure_suites(lab: Laboratory, options: SuiteOptions) -> list[Row]:
    return lab.first(max(options.counts)).by_run(options.runs, partial(measure_run, images=options.images))


def measure_run(lab: Laboratory, run: str, seed: int, images: int) -> Iterator[Row]:
    experts, about = lab.run(run).experts(seed), {"seed": seed, "run": run}
    if regime_of(lab.run(run), seed) == "linearised":
        yield from pair_rows(in_tangent_space(lab), experts, images, about)
        about["run"] = as_nets(run)
    yield from pair_rows(lab, experts, images, about)


def pair_rows(lab: Laboratory, experts: dict[str, State], images: int, about: Row) -> Iterator[Row]:
    alone = lab.individual(experts, "test")
    errors = ctl_errors(lab, experts, images)
    vectors = {task: task_vector(state, lab.base) for task, state in experts.items()}
    for i, j in combinations(experts, 2):
        merged = lab.accuracy(combine([experts[i], experts[j]], [0.5, 0.5]), "test", [i, j])
        lost = 50 * sum(alone[task] - merged[task] for task in (i, j))
        yield {**about, "pair": f"{i} – {j}", "loss": lost, **of_weights(vectors[i], vectors[j]), **errors[i, j]}


def ctl_errors(lab: Laboratory, experts: Mapping[str, State], images: int) -> dict[tuple[str, str], Row]:
    """Return each pair's CTL error at every block, as `block_1` and so on; what is below `ROUNDING` as 0.

    Args:
        lab: whose model the experts are weights of.
        images: of each task's validation, without their labels.
    """
    sources: dict[str, Featured] = {
        task: Subset.first(examples, images) for task, examples in lab.examples("validation").items()
    }
    module = lab.model.module
    if isinstance(lab.model, LinearisedModel):
        module = lab.model.base.module
        sources = {task: TangentFeatures(examples) for task, examples in sources.items()}
    layers = find_layers(module)
    asked = {f"{i} – {j}": Combination({i: 0.5, j: 0.5}, on=frozenset({i, j})) for i, j in combinations(experts, 2)}
    measured = affine(lab.model, sources, experts, asked, layers)

    def error(pair: str, layer: str) -> float:
        mean = float(measured[pair][layer].error.mean())
        return mean if mean > ROUNDING else 0.0

    return {
        (i, j): {f"block_{n}": error(f"{i} – {j}", layer) for n, layer in enumerate(layers, 1)}
        for i, j in combinations(experts, 2)
    }


def of_weights(first: State, second: State) -> Row:
    """Compare two task vectors: cosine, distance and sign conflict.

    Example:
        >>> one, other = {"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([3.0, -1.0])}
        >>> {key: round(value, 6) for key, value in of_weights(one, other).items()}
        {'cosine': 0.8, 'distance': 2.0, 'sign_conflict': 0.25}
    """
    smaller = {key: torch.minimum(first[key].abs(), second[key].abs()).double() for key in first}
    opposed = sum(float(value[first[key] * second[key] < 0].sum()) for key, value in smaller.items())
    total = sum(float(value.sum()) for value in smaller.values())
    return {
        "cosine": dot(first, second) / (norm(first) * norm(second)),
        "distance": norm({key: first[key] - second[key] for key in first}),
        "sign_conflict": opposed / total,
    }


# What the rows are asked


def blocks_of(rows: pd.DataFrame) -> list[str]:
    """Return the columns of the blocks' CTL errors, from the first block to the last."""
    return [name for name in rows if name.startswith("block_")]


def predicted(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with a column for each prediction of what rises with the loss of merging."""
    blocks = rows[blocks_of(rows)]
    values = [
        blocks.iloc[:, -1],
        blocks.mean(axis=1),
        blocks.max(axis=1),
        -rows.cosine,
        rows.distance,
        rows.sign_conflict,
    ]
    return rows.assign(**dict(zip(PREDICTIONS, values, strict=True)))


def ranks(rows: pd.DataFrame, runs: Sequence[str], column: str, by: str | None = "run") -> list[float]:
    """Return a prediction's rank correlation with the loss for each seed that all these runs have.

    Args:
        by: the mean over the ways of training; with None over the pairs of all ways together.
    """
    of_runs = select(predicted(rows), run=list(runs))
    seeds = of_runs.groupby("seed").run.nunique()
    common = select(of_runs, seed=list(seeds[seeds == len(runs)].index))
    return [rank_correlation(part.to_dict("records"), itemgetter(column), by) for _, part in common.groupby("seed")]


def over_rounds(iterative: Mapping[int, str], rows: pd.DataFrame) -> pd.DataFrame:
    """Return the last experts' mean CTL error of the last block over N, a column for each seed that all N have."""
    numbers = {run: number for number, run in iterative.items()}
    of_rounds = select(predicted(rows), run=list(numbers))
    return of_rounds.assign(rounds=of_rounds.run.map(numbers))


def falls(iterative: Mapping[int, str], rows: pd.DataFrame) -> Samples:
    by_round = over_rounds(iterative, rows)
    return steps(per_seed(by_round, "rounds", value=LAST), sign=-1) if len(by_round) else {}


def within_suite(count: int, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the pairs of the first so many tasks; the pairs of a seed stand in the order of the tasks."""
    tasks = list(dict.fromkeys(task for pair in rows.pair for task in pair.split(" – ")))
    return rows[[set(pair.split(" – ")) <= set(tasks[:count]) for pair in rows.pair]]


def suite_ranks(options: SuiteOptions, rows: pd.DataFrame, prediction: str) -> dict[int, list[float]]:
    return {n: ranks(within_suite(n, rows), list(options.runs), prediction) for n in sorted(options.counts)}


def suite_lead(options: SuiteOptions, other: str, rows: pd.DataFrame) -> Samples:
    first, second = (suite_ranks(options, rows, name) for name in (LAST, other))
    return {f"{count} tasks": paired(first[count], second[count]) for count in first}


def best_of_few(options: SuiteOptions, rows: pd.DataFrame) -> str:
    few = within_suite(min(options.counts), rows)
    return max(PREDICTIONS, key=lambda name: pd.Series(ranks(few, list(options.runs), name)).mean())


def behind_best(options: SuiteOptions, rows: pd.DataFrame) -> Samples:
    best, many = best_of_few(options, rows), within_suite(max(options.counts), rows)
    values = {name: ranks(many, list(options.runs), name) for name in PREDICTIONS}
    return {name: paired(values[best], of_prediction) for name, of_prediction in values.items() if name != best}


# Claims, written before the run
# fmt: off

def claims(options: Options) -> list[Claim]:
    runs = list(options.runs)

    def against(other: str, rows: pd.DataFrame) -> str:
        return " ({} against {})".format(*(with_interval(ranks(rows, runs, name), 2) for name in (LAST, other)))

    def lead(other: str, rows: pd.DataFrame) -> Samples:
        return {"difference of rank correlations": paired(ranks(rows, runs, LAST), ranks(rows, runs, other))}

    return [
        Claim("L1", "The less linear the features of two experts are, the more their average loses.",
              lambda rows: {LAST: ranks(rows, runs, LAST)}, low=RANKS, unit="", digits=2, ours=True,
              of="mean rank correlation over the ways of training"),
        Claim("L1", "It tells pairs of different ways of training apart as well.",
              lambda rows: {LAST: ranks(rows, runs, LAST, None)}, low=ACROSS, unit="", digits=2, ours=True,
              of="rank correlation over the pairs of all ways together"),
        *(Claim("L1", f"Linearity of features predicts what merging loses better than the {name} does.",
                partial(lead, name), low=BETTER, unit="", digits=2, ours=True, of="paired difference",
                also=partial(against, name))
          for name in OF_WEIGHTS),
        Claim("L1", "Merging while tuning makes the features of the last experts more linear, the more the oftener.",
              partial(falls, options.iterative), low=0, unit="", digits=4, ours=True,
              of="paired fall of the mean CTL error of the last block from each N to the next"),
    ]


def claims_of_suites(options: SuiteOptions) -> list[Claim]:
    few, many = min(options.counts), max(options.counts)
    return [
        Claim("L1", "The less linear the features of two experts are, the more their average loses, in suites of any "
                    "size.",
              lambda rows: {f"{n} tasks": values for n, values in suite_ranks(options, rows, LAST).items()},
              low=RANKS, unit="", digits=2, ours=True,
              of="mean rank correlation over the ways of training, in each suite,"),
        *(Claim("L1", f"Linearity of features predicts what merging loses better than the {name} does, in suites of "
                      "any size.", partial(suite_lead, options, name), low=BETTER, unit="", digits=2, ours=True,
                of="paired difference of rank correlations in each suite")
          for name in OF_WEIGHTS),
        Claim("L1", lambda rows: f"The prediction that ranks the pairs of {few} tasks best, "
                                 f"{best_of_few(options, rows)}, ranks those of {many} tasks as well.",
              partial(behind_best, options), low=-BETTER, unit="", digits=2, ours=True,
              of=f"paired difference of rank correlations at {many} tasks from every other prediction"),
    ]
# fmt: on


def rank_table(options: Options, blocks: bool, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rank correlations by way of training, of each prediction or of the CTL error at each block."""
    names = {name: name.replace("_", " ") for name in blocks_of(rows)} if blocks else {n: n for n in PREDICTIONS}
    runs = list(options.runs)
    return pd.DataFrame(
        {
            label: {
                **{options.runs[run]: with_interval(ranks(rows, [run], name), 2) for run in runs},
                "mean": with_interval(ranks(rows, runs, name), 2),
                "across all": with_interval(ranks(rows, runs, name, None), 2),
            }
            for name, label in names.items()
        }
    ).T.rename_axis("prediction")


def pair_table(options: Options, rows: pd.DataFrame) -> pd.DataFrame:
    labels = {run: f"MIMA, N = {n}" for n, run in options.iterative.items()} | options.runs
    labels |= {as_nets(run): as_nets(label) for run, label in options.runs.items()}
    shown = {"loss": "loss of merging, points", LAST: LAST, "cosine": "cosine", "sign_conflict": CONFLICT}
    pairs = predicted(rows).assign(experts=rows.run.map(labels))
    return side_by_side(pairs, "experts", shown, {LAST: 4, "cosine": 3, "sign_conflict": 3})


def suite_rank_table(options: SuiteOptions, rows: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            name: {
                f"{label}, {count} tasks": with_interval(ranks(within_suite(count, rows), [run], name), 2)
                for run, label in options.runs.items()
                for count in sorted(options.counts)
            }
            for name in PREDICTIONS
        }
    ).T.rename_axis("prediction")


def suite_pair_table(options: SuiteOptions, rows: pd.DataFrame) -> pd.DataFrame:
    suites = [(count, within_suite(count, rows)) for count in sorted(options.counts)]
    of_suites = pd.concat(suite.assign(tasks=count, pairs=suite.pair.nunique()) for count, suite in suites)
    shown = {"loss": "loss of merging, points", "cosine": "cosine", "sign_conflict": CONFLICT}
    named = of_suites.assign(experts=of_suites.run.map(options.runs))
    return side_by_side(named, ["experts", "tasks", "pairs"], shown, {"cosine": 3, "sign_conflict": 3})


def predictions_figure(runs: Mapping[str, str], rows: pd.DataFrame) -> Figure:
    """Draw the loss of merging over each prediction, a point for each pair and seed, a colour for each way."""
    of_runs, names = select(predicted(rows), run=list(runs)), (LAST, *OF_WEIGHTS)
    labels = {name: f"{name}, negated" if name == COSINE else name for name in names}
    figure = scatter(of_runs, labels, "loss", "run", y_label="loss of merging, points", labels=runs)
    figure.axes[0].set_xscale("log")
    return figure


def rounds_figure(iterative: Mapping[int, str], rows: pd.DataFrame) -> Figure:
    """Draw the mean CTL error of the last experts over the number of rounds."""
    by_round = over_rounds(iterative, rows)
    return curves(by_round, "rounds", value=LAST, title="Last experts, mean of all pairs", x_label="rounds N",
                  y_label=LAST, scale="rounds")  # fmt: skip


def figures(options: Options) -> dict[str, partial[Figure]]:
    drawn = {"predictions": partial(predictions_figure, options.runs)}
    return drawn | ({"rounds": partial(rounds_figure, options.iterative)} if options.rounds else {})


about_pairs = partial(
    Study, runs=lambda options: options.all_runs, splits=("validation", "test"), systems=("L1",), figures=figures
)
STUDIES = {
    "mergeability": about_pairs(
        options=Options,
        measure=measure,
        claims=claims,
        tables=lambda options: {
            "Rank correlation with the loss of merging, by way of training": partial(rank_table, options, False),
            "The same of the CTL error at each block": partial(rank_table, options, True),
            "Pairs: what merging loses, and how linear features are": partial(pair_table, options),
        },
    ),
    "mergeability_suites": about_pairs(
        options=SuiteOptions,
        measure=measure_suites,
        claims=claims_of_suites,
        tables=lambda options: {
            "Rank correlation with the loss of merging": partial(suite_rank_table, options),
            "Pairs of a suite: what merging loses, and how task vectors lie": partial(suite_pair_table, options),
        },
    ),
}
