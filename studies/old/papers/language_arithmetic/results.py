"""Tables and findings of the study `language_arithmetic`, from its rows. The rules were written before the run."""

import json
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

from studies.old.claims import judge, paired
from studies.old.papers.analogy.results import ANALOGY, NEAREST, SUM, TRAINED, WAYS, scores, with_nearest
from studies.old.papers.language_arithmetic.measuring import BASE, INDIVIDUAL, JOINT
from studies.old.papers.language_arithmetic.options import PLAIN
from studies.old.results import Cell, Finding, StudyResult, Table, with_interval
from studies.old.rows import Row, by_seed, tidy

NEARER, ABOVE_BASE, BEHIND = 0.05, 0.1, 0.1  # nats a token, of analogies
GAIN, SHARE, TREATED = 0.2, 50.0, 0.02  # nats, % and nats, of three domains
BEST, TREATING = "best merge", "best that treats interference"
_TRAINED = (BASE, INDIVIDUAL, JOINT)


def analogies(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the analogies, and for each target the single expert that is best on validation.

    Args:
        rows: of all seeds.
    """
    return with_nearest([row for row in rows if row.get("way") not in (None, NEAREST)])


def domains(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the three domains, and those of the merges that are best on validation.

    Args:
        rows: of all seeds.
    """
    own = [row for row in rows if row.get("model") not in (None, BEST, TREATING)]
    merged = [model for model in dict.fromkeys(row["model"] for row in own) if model not in _TRAINED]
    found = list(own)
    for name, among in {BEST: merged, TREATING: [model for model in merged if model not in PLAIN]}.items():
        for seed in dict.fromkeys(row["seed"] for row in own):
            mine = {m: [row for row in own if (row["seed"], row["model"]) == (seed, m)] for m in among}
            best = max(among, key=lambda model: fmean(row["validation"] for row in mine[model]))
            found += [{**row, "model": name, "method": best} for row in mine[best]]
    return found


def means(rows: Sequence[Row], model: str, domain: str | None = None) -> list[float]:
    """Return a model's log-likelihood per token on test, the mean over domains, one number for each seed.

    Args:
        rows: of the domains.
        model: which.
        domain: of this one alone.
    """
    own = [row for row in rows if row["model"] == model and domain in (None, row["domain"])]
    return by_seed(own, lambda found: fmean(row["test"] for row in found))


def closed(values: Sequence[float], start: Sequence[float], end: Sequence[float]) -> list[float]:
    """Return how much of the way from `start` to `end` each value has gone, in %.

    Args:
        values: one for each seed.
        start: of the same seeds.
        end: of the same seeds, each other than its start.

    Example:
        >>> closed([-1.5], [-2.0], [-1.0])
        [50.0]
    """
    return [100 * (one - low) / (high - low) for one, low, high in zip(values, start, end, strict=True)]


def study_result(rows: Sequence[Row]) -> StudyResult:
    """Return the study's result.

    Args:
        rows: of all seeds.
    """
    one, two = analogies(rows), domains(rows)
    names = list(dict.fromkeys(row["attributes"] for row in one))
    tables = [*(_analogy_table(one, name) for name in names), _domain_table(two)]
    found = [finding for name in names for finding in _of_analogies(one, name)]
    return StudyResult(tables, [*found, *_of_domains(two)], [_note(two)], tidy([*one, *two]))


def _of_analogies(rows: Sequence[Row], name: str) -> list[Finding]:
    analogy = scores(rows, name, ANALOGY)
    ahead, behind = "by ≥ {:g} nat a token", "at most {:g} nat a token behind"
    claims = (
        ("reaches a task that nobody trained better than the nearest expert", NEAREST, NEARER, ahead),
        ("is better on that task than the base", BASE, ABOVE_BASE, ahead),
        ("is better than Δ_A + Δ_B: taking Δ_C away is worth it", SUM, 0.0, ahead),
        ("is as good as training on the task", TRAINED, -BEHIND, behind),
    )
    found = [
        judge(
            "P22",
            f"Δ_A + (Δ_B − Δ_C) {claim} ({name}).",
            {f"less {way}": paired(analogy, scores(rows, name, way))},
            f"{rule.format(abs(low))}, mean over the four targets",
            low=low,
            unit=" nat",
            digits=2,
            ours=way != BASE,
        )
        for claim, way, low, rule in claims
    ]
    unlabelled = judge(
        "P22",
        f"With λ = 1, which asks for no labelled data, it is better on that task than the base ({name}).",
        {"less base": paired(scores(rows, name, f"{ANALOGY}, λ = 1"), scores(rows, name, BASE))},
        "paired difference ≥ 0, mean over the four targets",
        low=0,
        unit=" nat",
        digits=2,
    )
    return [*found, unlabelled]


def _of_domains(rows: Sequence[Row]) -> list[Finding]:
    best, base, own = (means(rows, model) for model in (BEST, BASE, INDIVIDUAL))
    joint, treating, plain = (means(rows, model) for model in (JOINT, TREATING, PLAIN[1]))
    told = partial(judge, "B7", ours=True)
    nats: dict[str, Any] = {"unit": " nat", "digits": 2}
    return [
        told(
            "One merge of three experts writes all three domains better than the base.",
            {"best merge less base": paired(best, base)},
            f"log-likelihood higher by ≥ {GAIN:g} nat a token, mean over domains; method and arguments by validation",
            low=GAIN,
            **nats,
        ),
        told(
            "It closes at least half of the gap between the base and the experts.",
            {"closed": closed(best, base, own)},
            f"≥ {SHARE:g} %",
            low=SHARE,
            unit=" %",
        ),
        told(
            "It is as good as joint training of as many steps as the three experts together.",
            {"best merge less joint training": paired(best, joint)},
            f"at most {BEHIND:g} nat a token behind",
            low=-BEHIND,
            **nats,
        ),
        told(
            "A method that treats interference is better than task arithmetic.",
            {"best of them, by validation, less task arithmetic": paired(treating, plain)},
            f"by ≥ {TREATED:g} nat a token",
            low=TREATED,
            **nats,
        ),
    ]


def _analogy_table(rows: Sequence[Row], name: str) -> Table:
    targets = list(dict.fromkeys(row["target"] for row in rows if row["attributes"] == name))
    base, trained = (scores(rows, name, way) for way in (BASE, TRAINED))
    lines: list[dict[str, Cell]] = []
    for way in WAYS:
        mean = scores(rows, name, way)
        scales = [row["scale"] for row in rows if (row["attributes"], row["way"]) == (name, way) and row.get("scale")]
        lines.append(
            {
                "way": way,
                "mean λ": f"{fmean(scales):.2f}" if scales else "",
                **{target: with_interval(scores(rows, name, way, target), 2) for target in targets},
                "mean": with_interval(mean, 2),
                "of the gap, %": "" if way in (BASE, TRAINED) else with_interval(closed(mean, base, trained)),
            }
        )
    return Table(f"{name}: log-likelihood per token of the target's test texts, nats", lines)


def _domain_table(rows: Sequence[Row]) -> Table:
    models = [model for model in dict.fromkeys(row["model"] for row in rows) if model not in (*_TRAINED, TREATING)]
    base, expert = (means(rows, model) for model in (BASE, INDIVIDUAL))
    names = list(dict.fromkeys(row["domain"] for row in rows))
    lines: list[dict[str, Cell]] = []
    for model in [*_TRAINED, *sorted(models, key=lambda one: -fmean(means(rows, one)))]:
        mean = means(rows, model)
        own = [row for row in rows if row["model"] == model and row["domain"] == names[0]]
        chosen = dict.fromkeys(row["args"] for row in own if row.get("args") and model != BEST)
        lines.append(
            {
                "model": model,
                **{domain: with_interval(means(rows, model, domain), 2) for domain in names},
                "mean": with_interval(mean, 2),
                "of the gap, %": "" if model in (BASE, INDIVIDUAL) else with_interval(closed(mean, base, expert)),
                "chosen on validation": "; ".join(map(_told, chosen)),
            }
        )
    return Table("Three domains: log-likelihood per token of their test texts, nats", lines)


def _told(args: str) -> str:
    return ", ".join(f"{name} {value}" for name, value in json.loads(args).items())


def _note(rows: Sequence[Row]) -> str:
    picked = {name: [r["method"] for r in rows if r["model"] == name] for name in (BEST, TREATING)}
    each = {name: ", ".join(found[:: len({row["domain"] for row in rows})]) for name, found in picked.items()}
    return f"The best merge on validation, by seed: {each[BEST]}; of those that treat interference: {each[TREATING]}."
