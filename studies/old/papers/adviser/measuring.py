"""What the study `adviser` measures: λ by each way of choosing it, and what taking one task away costs another."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, permutations

from mergeflow.analysis.geometry import cosine_matrix, norm
from mergeflow.analysis.provable.answers import ask
from mergeflow.analysis.provable.conditions import Interval
from mergeflow.analysis.provable.correlation import correlations, responses
from mergeflow.analysis.provable.ranges import scales_of_lengths, scales_of_theory, suggested
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.subset import Subset
from mergeflow.modality import State
from mergeflow.search.candidates import score_all
from mergeflow.search.optuna import optuna_search
from mergeflow.search.sweep_file import SearchPart
from studies.lab.coloured import Digits, Pretrained, accuracy, coloured, name_of
from studies.lab.scales import best_scale, combined, task_vector
from studies.old.pieces import grid
from studies.old.rows import Row

GRID = grid(0.1, 2.0, 0.1)
FIXED = 0.4
TRIALS = 4
WAYS = ("grid", "theory", "lengths", "optuna", "fixed")


def measured_rows(
    base: Pretrained,
    experts: Mapping[str, State],
    splits: Mapping[str, Digits],
    colours: Sequence[float],
    samples: int,
    sizes: Sequence[int],
    seed: int,
) -> dict[str, list[Row]]:
    """Return the rows of one seed and length: `sets` of added tasks, and `edits`.

    Args:
        base: the net and Ψ^(0).
        experts: weights by task.
        splits: the digits.
        colours: r_o of the tasks.
        samples: of each task's validation digits, for the predictions.
        sizes: of the sets.
        seed: of Optuna.
    """
    validation, test = (
        {name_of(one): coloured(splits[split], one, name_of(one)) for one in colours}
        for split in ("validation", "test")
    )
    asked = ask(base.model, base.start, experts, {task: Subset.first(one, samples) for task, one in validation.items()})
    alphas, changes = correlations(asked.experts), correlations(asked.changes)
    moved = responses(asked.experts, asked.base)
    vectors = {task: task_vector(state, base.start) for task, state in experts.items()}
    cosines = cosine_matrix(list(vectors.values()))
    names, norms = list(experts), [norm(vector) for vector in vectors.values()]

    def sets() -> list[Row]:
        rows = []
        for size in sizes:
            for chosen in combinations(range(len(names)), size):
                part = [names[i] for i in chosen]
                ranges = {
                    "theory": scales_of_theory(part_of(changes.values, chosen)),
                    "lengths": scales_of_lengths([norms[i] for i in chosen], part_of(cosines, chosen)),
                }
                rows.append(_set_row(base, vectors, part, ranges, validation, test, seed))
        return rows

    def edits() -> list[Row]:
        own = {task: accuracy(base.model, experts[task], {task: test[task]})[task] for task in names}
        rows = []
        for keep, forget in permutations(names, 2):
            i, j = names.index(keep), names.index(forget)
            told = {"eq11": alphas.values[i][j], "changes": changes.values[i][j], "response": moved[i][j]}
            row = {"keep": keep, "forget": forget, **told, "cosine": cosines[i][j]}
            edited = combined(base.start, vectors, {keep: 1.0, forget: -1.0})
            found = accuracy(base.model, edited, {name: test[name] for name in (keep, forget)})
            rows.append({**row, "loss": own[keep] - found[keep], "left": found[forget]})
        return rows

    return {"sets": sets(), "edits": edits()}


def part_of(matrix: Sequence[Sequence[float]], chosen: Sequence[int]) -> list[list[float]]:
    """Return the rows and columns of some tasks."""
    return [[matrix[i][j] for j in chosen] for i in chosen]


def _set_row(
    base: Pretrained,
    vectors: Mapping[str, State],
    part: Sequence[str],
    ranges: Mapping[str, Interval],
    validation: Mapping[str, Classification],
    test: Mapping[str, Classification],
    seed: int,
) -> Row:
    def scorer(data: Mapping[str, Classification]) -> Callable[[float], float]:
        known: dict[float, float] = {}

        def score(scale: float) -> float:
            if scale not in known:
                state = combined(base.start, vectors, dict.fromkeys(part, scale))
                known[scale] = sum(accuracy(base.model, state, {t: data[t] for t in part}).values()) / len(part)
            return known[scale]

        return score

    on_validation, on_test = scorer(validation), scorer(test)
    tried = tried_scales(GRID, ranges, on_validation, seed)
    row: Row = {"tasks": " ".join(part), "size": len(part)}
    for way in WAYS:
        best = best_scale(tried[way], on_validation)
        row |= {f"scale_{way}": best, f"tried_{way}": len(tried[way]), f"test_{way}": on_test(best)}
    return row | range_columns(ranges, row["scale_grid"])


def tried_scales(
    scales: Sequence[float], ranges: Mapping[str, Interval], score: Callable[[float], float], seed: int
) -> dict[str, Sequence[float]]:
    """Return the λ that each way of choosing one tries.

    Args:
        scales: the grid; Optuna tries λ between its ends.
        ranges: predicted ones, by way.
        score: of a λ, on validation.
        seed: of Optuna.
    """
    told = {way: [FIXED] if found.empty else suggested(found) for way, found in ranges.items()}
    return {"grid": scales, "fixed": [FIXED], "optuna": _optuna(scales, score, seed), **told}


def range_columns(ranges: Mapping[str, Interval], best: float) -> Row:
    """Return the ends of predicted ranges, and whether the best λ of the grid lies inside.

    Args:
        ranges: by way.
        best: the λ.
    """
    row: Row = {}
    for way, found in ranges.items():
        row |= {f"low_{way}": None if found.empty else found.low, f"high_{way}": None if found.empty else found.high}
        row[f"hit_{way}"] = not found.empty and found.low <= best <= found.high
    return row


def _optuna(scales: Sequence[float], score: Callable[[float], float], seed: int) -> list[float]:
    """Return the λ that Optuna tries between the ends of the grid."""
    space = {"scale": {"low": scales[0], "high": scales[-1]}}
    strategy = optuna_search("task_arithmetic", space, SearchPart(trials=TRIALS), seed)
    found = score_all("task_arithmetic", strategy, lambda call: {"all": score(call.scale)}, lambda one: one["all"])
    return [one.call.scale for one in found]
