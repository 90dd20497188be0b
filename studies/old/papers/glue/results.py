"""What the study `glue` says: tables, findings and figures of its rows, one row per seed, model and embeddings."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from matplotlib.figure import Figure

from mergeflow.evaluation.averages import normalised
from studies.lab.inputs import mean_accuracy
from studies.lab.sweeps import NAMES
from studies.old.claims import judge, paired
from studies.old.leading import leader
from studies.old.papers.glue.choices import Tried, choice_table, ends_note, rate_table
from studies.old.papers.glue.compressed import compressed_findings, compressed_table
from studies.old.papers.glue.figures import heads_figure
from studies.old.results import Cell, Finding, Table, with_interval
from studies.old.rows import Row

Labels = Mapping[str, str]
WIDER = ", wider grid"

# CART's Table 2, mean over eight tasks of GLUE, in per cent.
PRINTED = {"individual": 85.56, "average": 51.34, "task_arithmetic": 66.65, "ties": 64.04, "cart": 70.78}
IMPROVED = 4.9  # points: a quarter of what CART has over the average in Table 2, "improves substantially"
READABLE = 1.0  # points by which heads that are fitted once more have to be better, to say that they matter
NEGLIGIBLE = 1.0  # points that merging the embeddings may change, to say that it does not matter
_LADDER = ("average", "ties", "task_arithmetic", "cart", "individual")


class Results:
    """The rows, asked by model; `labels` name the models that are trained beside the merges."""

    def __init__(self, rows: Sequence[Row], labels: Labels | None = None) -> None:
        self._rows = {(row["model"], row["embeddings"], row["seed"]): row for row in rows}
        there = {row["model"] for row in rows}
        self.names = {"base": "base", "individual": "individual", **(labels or {})}
        for name, label in NAMES.items():
            if name != "zero_shot":
                self.names[name] = label
            if name + WIDER in there:
                self.names[name + WIDER] = label + WIDER
        self.models = [name for name in self.names if name in there]
        self.seeds = sorted({row["seed"] for row in rows})
        self.tasks = list(rows[0]["fixed"])

    def rows(self, model: str, embeddings: str = "merged") -> list[Row]:
        """Return a model's rows, one per seed; none where it was not measured.

        Args:
            model: its name.
            embeddings: `merged`, or `base` for those of the base.
        """
        kind = "base" if model == "base" else embeddings
        return [row for seed in self.seeds if (row := self._rows.get((model, kind, seed))) is not None]

    def means(self, model: str, heads: str = "fixed", embeddings: str = "merged") -> list[float]:
        """Return the mean over tasks in %, one value per seed.

        Args:
            model: its name.
            heads: `fixed` or `probed`.
            embeddings: `merged` or `base`.
        """
        return [mean_accuracy(row[heads]) for row in self.rows(model, embeddings) if heads in row]

    def normalised(self, model: str) -> list[float]:
        """Return the normalised accuracy in %, one value per seed."""
        pairs = zip(self.rows(model), self.rows("individual"), strict=True)
        return [100 * normalised(row["fixed"], own["fixed"]) for row, own in pairs]

    def lead(self, better: str, worse: str) -> list[float]:
        """Return the paired differences of the means, one value per seed.

        Args:
            better: a model.
            worse: the model it is compared with.
        """
        return paired(self.means(better), self.means(worse))


def tables(rows: Sequence[Row], labels: Labels) -> list[Table]:
    """Return the paper's Table 2 with its further rows, heads, embeddings, Table 4, and what was chosen.

    Args:
        rows: of the study.
        labels: of the joint and iterative runs.
    """
    found = Results(rows, labels)
    whole = [_line(found, model) for model in found.models]
    heads = [
        _two(found, m, "fixed", found.means(m), "probed", p) for m in found.models if (p := found.means(m, "probed"))
    ]
    kept = [
        _two(found, model, "merged", found.means(model), "the base's", own)
        for model in found.models
        if model != "base" and (own := found.means(model, embeddings="base"))
    ]
    made = [
        Table("Test figures, %, mean over seeds; mean over tasks with its interval", whole),
        Table("Heads fixed, and fitted once more to the model's features; mean test figure, %", heads),
        Table("Embeddings merged, and those of the base; mean test figure, %", kept),
        compressed_table(rows),
        choice_table(rows, found.names),
        rate_table(rows, found.names),
    ]
    return [table for table in made if table.rows]


def _line(found: Results, model: str) -> dict[str, Cell]:
    tasks = {task: f"{fmean(100 * row['fixed'][task] for row in found.rows(model)):.1f}" for task in found.tasks}
    return {
        "model": found.names[model],
        **tasks,
        "mean": with_interval(found.means(model)),
        "normalised": with_interval(found.normalised(model)),
        "in the paper": f"{PRINTED[model]:.1f}" if model in PRINTED else None,
    }


def _two(
    found: Results, model: str, first: str, one: Sequence[float], second: str, other: Sequence[float]
) -> dict[str, Cell]:
    return {
        "model": found.names[model],
        first: with_interval(one),
        second: with_interval(other),
        "difference": with_interval(paired(other, one)),
    }


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Hold what the paper says against the figures, and what it leaves open."""
    found = Results(rows)
    asked = [_ahead(found, other) for other in ("task_arithmetic", "ties", "average") if other in found.models]
    ours = [*_heads(found), _embeddings(found), *_wider(found)]
    return [*asked, _order(found), _improves(found), _vectors(found), *compressed_findings(rows), *ours]


def _ahead(found: Results, other: str) -> Finding:
    words = f"CART is ahead of {found.names[other]} ({PRINTED['cart']:.1f} and {PRINTED[other]:.1f} in the paper)."
    gains = {f"CART less {found.names[other]}": found.lead("cart", other)} if "cart" in found.models else {}
    return judge("C9", words, gains, "paired difference ≥ 0", low=0)


def _order(found: Results) -> Finding:
    ladder = [name for name in _LADDER if name in found.models]
    steps = {f"{found.names[high]} less {found.names[low]}": found.lead(high, low) for low, high in pairwise(ladder)}
    words = " < ".join(found.names[name] for name in ladder)
    return judge("C9", f"{words}: the order of Table 2.", steps, "each paired difference ≥ 0", low=0)


def _improves(found: Results) -> Finding:
    gains = {"CART less average": found.lead("cart", "average")} if "cart" in found.models else {}
    return judge(
        "C9",
        "The low-rank parts that CART adds to the average improve it substantially.",
        gains,
        f"paired difference ≥ {IMPROVED} points, a quarter of the paper's 19.4",
        low=IMPROVED,
    )


def _vectors(found: Results) -> Finding:
    there = [name for name in ("task_arithmetic", "ties") if name in found.models]
    return judge(
        "C9",
        "The average is behind the approaches based on task vectors.",
        {f"{found.names[name]} less average": found.lead(name, "average") for name in there},
        "each paired difference ≥ 0",
        low=0,
    )


def _heads(found: Results) -> list[Finding]:
    merged = [name for name in found.models if name in NAMES and name != "individual" and found.means(name, "probed")]
    gains = {found.names[name]: paired(found.means(name, "probed"), found.means(name)) for name in merged}
    better = judge(
        "C9",
        "A merge tells more than the experts' heads read of it: heads fitted to its features are better.",
        gains,
        f"paired difference ≥ {READABLE:g} point, for every merge whose heads were fitted once more",
        low=READABLE,
        ours=True,
    )
    others = [name for name in merged if name != "cart"] if "cart" in merged else []
    ahead = {
        f"CART less {found.names[name]}": paired(found.means("cart", "probed"), found.means(name, "probed"))
        for name in others
        if name in ("average", "task_arithmetic", "ties")
    }
    order = judge(
        "C9",
        "CART comes ahead of the average, task arithmetic and TIES when heads are fitted to each merge.",
        ahead,
        "each paired difference ≥ 0",
        low=0,
        ours=True,
    )
    return [better, order]


def _embeddings(found: Results) -> Finding:
    pairs = {name: found.means(name, embeddings="base") for name in found.models if name != "base"}
    return judge(
        "C9",
        "It does not matter whether the embeddings are merged.",
        {found.names[name]: paired(found.means(name), own) for name, own in pairs.items() if own},
        f"merged less the base's: between −{NEGLIGIBLE:g} and {NEGLIGIBLE:g} point, for every method that was tried",
        low=-NEGLIGIBLE,
        high=NEGLIGIBLE,
        ours=True,
    )


def _wider(found: Results) -> list[Finding]:
    """Hold CART, chosen among smaller ranks and λ as well, against the baselines of the paper."""
    wide = f"cart{WIDER}"
    if wide not in found.models:
        return []
    others = [name for name in ("task_arithmetic", "ties", "average") if name in found.models]
    gains = {f"CART{WIDER} less {found.names[name]}": found.lead(wide, name) for name in others}
    claim = "With smaller ranks and λ than the paper's, CART is ahead of task arithmetic, TIES and the average."
    return [judge("C9", claim, gains, "each paired difference ≥ 0", low=0, ours=True)]


def notes(rows: Sequence[Row], labels: Labels, tried: Tried) -> list[str]:
    """Return what decides the table, and which choices may go on.

    Args:
        rows: of the study.
        labels: of the joint and iterative runs.
        tried: model → argument → the values that were tried of it.
    """
    found = Results(rows, labels)
    merged = [name for name in found.models if name not in ("base", "individual", *labels)]
    best, told = leader({name: found.means(name) for name in merged}, found.names)
    gap = with_interval(paired(found.means("individual"), found.means(best)))
    pairs = list(zip(found.rows("individual"), found.rows(best), strict=True))
    lost = {task: [100 * (own["fixed"][task] - row["fixed"][task]) for own, row in pairs] for task in found.tasks}
    _, worst = leader(lost, {task: task for task in found.tasks})
    return [
        f"The highest mean of a merge is that of {told}. It stays {gap} points below the experts. Its largest loss, "
        f"in the mean over seeds, is that on {worst}.",
        *ends_note(rows, found.names, tried),
    ]


def figures(rows: Sequence[Row], labels: Labels) -> dict[str, Figure]:
    """Draw the mean figure of every model, and with heads that are fitted to it.

    Args:
        rows: of the study.
        labels: of the joint and iterative runs.
    """
    found = Results(rows, labels)
    names = [name for name in found.models if found.means(name)]
    fixed = {found.names[name]: found.means(name) for name in names}
    probed = {found.names[name]: own for name in names if (own := found.means(name, "probed"))}
    return {"heads": heads_figure(fixed, probed)}
