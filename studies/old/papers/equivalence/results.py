"""What the study `equivalence` makes of its measurements: printed tables, findings, and notes on the published text."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from studies.old.results import Cell, Finding, StudyResult, Table
from studies.old.rows import Row, tidy

Rows = Sequence[Row]
Tables = Mapping[str, Rows]
EXACT = 1e-12
SLOPES = {"gap": "gap", "after_derived": "less derived", "after_halved": "less half", "after_printed": "less printed"}
_CONSTANTS = (("G", "gradient"), ("H", "hessian"))
_KINDS = {"": "measured", "_printed": "printed", "_derived": "derived"}
NOTES = [
    "Theorem 1, equation 2, is wrong in sign and lacks a factor: the gap is −αη²C, not +η²C. The last line of the "
    "paper's own proof has −α; the ½ in its Taylor step is the one of the loss's expansion, not of the gradient's.",
    "Theorem 2, task factor: |αT − 1| (statement) holds for αT ≥ 2 and is 0 at α = 1/T, the average, where C is not; "
    "|α(T+1) − 1| (last line of the proof) holds for α(T+1) ≥ 2 and is then larger than needed; max(1, |αT − 1|) holds "
    "always, and by algebra no smaller factor does. The number of pairs of epochs, C(h+2, 2) or (h+1)(h+2)/2, is the "
    "same and right.",
    "Theorem 2, network constants: the printed G lacks the sum over layers, √(Σ_l s_l^−2); the printed H is 0 where "
    "φ'' = 0, and for ReLU drops the products of two layers' weights. For weights of usual size both are far above ‖C‖ "
    "and the error does not show; for small weights they are below it. The main text's ReLU line takes H·G for H and "
    "multiplies by G again.",
    "For ReLU the expansion ends at the step size at which a hidden unit switches side: the gradient jumps there, and "
    "the theorem's Taylor step has no Hessian. Beyond it the gap falls at no single rate.",
]


def study_result(tables: Tables) -> StudyResult:
    """Return printed tables, findings and notes of `equivalence.measure`'s tables."""
    findings = [*_exact(tables), *_second_order(tables), *_bounds(tables)]
    rows = [{"table": name, **row} for name in tables for row in tables[name]]
    return StudyResult(list(_printed(tables)), findings, NOTES, tidy(rows))


def _exact(tables: Tables) -> Iterator[Finding]:
    error = max(row["error"] for row in tables["one_epoch"])
    yield Finding(
        "G1",
        "After one epoch the task vector is −η∇L(θ0), to 1e-12.",
        f"largest difference {error:.1e} over {len(tables['one_epoch'])} experts",
        error <= EXACT,
        f"every expert of every model and seed ≤ {EXACT:g}: one exception refutes it",
    )
    first = max(row["error"] for row in tables["joint"] if row["epochs"] == 1)
    later = min(row["error"] for row in tables["joint"] if row["epochs"] > 1)
    yield Finding(
        "G2",
        "One-epoch task arithmetic with scale α is one joint step αη, to 1e-12; with more epochs it is not.",
        f"largest difference {first:.1e} after one epoch; after more at least {later:.1e}",
        first <= EXACT < later,
        f"one epoch ≤ {EXACT:g} < more epochs, for every model and seed",
    )


def _second_order(tables: Tables) -> Iterator[Finding]:
    for name, claim, slope in (
        ("gap", "The gap falls as η².", 2),
        ("after_derived", "Less the derived −αη²C′ it falls as η³.", 3),
        ("after_halved", "Less half of that (the ½ of the proof's Taylor step) it falls as η³.", 3),
        ("after_printed", "Less the printed +η²C (Theorem 1) it falls as η³.", 3),
    ):
        found = [row[name] for row in tables["slopes"]]
        holds = all(abs(value - slope) <= 0.1 for value in found)
        rule = f"slope within 0.1 of {slope}, for every model and seed"
        yield Finding(
            "G3", claim, f"log–log slopes {_range(found, '.2f')} over {len(found)} models and seeds", holds, rule
        )
    worst = max(abs(row["measured"] - row["derived"]) / row["scale"] for row in tables["coefficient"])
    at = [own[0] for _, own in _by(tables["gap"], "model", "seed")]
    yield Finding(
        "G3",
        "The coefficient along C is the derived −α, not the printed +1 or the halved −α/2.",
        f"at α = {at[0]['scale']} measured {_range([row['coefficient'] for row in at], '.5f')}; over all α within "
        f"{100 * worst:.4f} % of −α",
        worst <= 0.01,
        "within 1 % of −α, for every model, seed and α",
    )
    off = max(abs(row["ratio"] / row["derived"] - 1) for row in tables["growth"])
    most = max(row["epochs"] for row in tables["growth"])
    yield Finding(
        "G3",
        "The gap grows with k as the number of pairs of epochs, k(k−1)/2.",
        f"within {100 * off:.3f} % up to k = {most}",
        off <= 0.02,
        "within 2 %, for every model, seed and k",
        ours=True,
    )


def _bounds(tables: Tables) -> Iterator[Finding]:
    factors, networks = tables["task_factor"], tables["network"]
    worst = max(row["measured"] / row["derived"] for row in factors)
    slack = max(row["norm"] / row["derived"] for row in networks)
    yield Finding(
        "G4",
        "‖C‖₂ is below the derived bounds everywhere.",
        f"at most {worst:.2f} of the bound with measured H and G, {slack:.1e} of the one in spectral norms",
        worst <= 1 and slack <= 1,
        "measured / bound ≤ 1 everywhere",
        ours=True,
    )
    usual = [row for row in networks if row["gain"] == 1]
    below = [max(row["norm"] / row[name] for row in usual) for name in ("statement", "appendix")]
    yield Finding(
        "G4",
        f"At α = {usual[0]['scale']} and weights of usual size ‖C‖₂ is below both printed bounds.",
        f"‖C‖ / bound {below[0]:.1e} (main text) and {below[1]:.1e} (appendix)",
        max(below) <= 1,
        "‖C‖ / bound ≤ 1 for every net and seed",
    )
    for name, claim in (("statement", "|αT − 1| (statement)"), ("proof", "|α(T+1) − 1| (last line of the proof)")):
        failing = sorted({row["scale"] for row in factors if row["measured"] > row[name]})
        text = f"fails at α = {', '.join(f'{scale:.3g}' for scale in failing)}" if failing else "holds at all tried α"
        yield Finding("G4", f"The task factor {claim} bounds C.", text, not failing, "at every α, model and seed")
    for name, claim in (("statement", "main text"), ("appendix", "appendix")):
        failing_nets = [row for row in networks if row["norm"] > row[name]]
        text = "; ".join(
            f"{model} ×{gain:g}: {_range([row['norm'] / row[name] for row in own], '.1e')} ({len(own)} seeds)"
            for (model, gain), own in _by(failing_nets, "model", "gain")
        )
        yield Finding(
            "G4",
            f"The bound in the weights' spectral norms as printed in the {claim} holds.",
            f"‖C‖ / bound, where above 1: {text or 'nowhere'}",
            not failing_nets,
            "‖C‖ / bound ≤ 1 for every net, size of weights and seed: one exception refutes it",
        )


def _printed(tables: Tables) -> Iterator[Table]:
    yield Table("G1, G2: the largest difference in any weight", list(_exact_rows(tables)))
    yield Table("G3: log–log slopes over η, range over seeds", list(_slope_rows(tables["slopes"])))
    claims = {"derived": "derived −α", "halved": "half of it", "printed": "printed"}
    coefficients = _side_by_side(tables["coefficient"], "scale", "α", "measured", ".4f", claims)
    yield Table("G3: the coefficient of η²C in the gap, range over seeds", list(coefficients))
    growth = _side_by_side(tables["growth"], "epochs", "k", "ratio", ".3f", {"derived": "k(k−1)/2"})
    yield Table("G3: the gap after k epochs over that after two, range over seeds", list(growth))
    yield Table("G3: the gap and what is left of it, first seed", list(_gap_rows(tables["gap"])))
    claims = {"statement": "statement", "proof": "proof", "derived": "derived"}
    factors = _side_by_side(tables["task_factor"], "scale", "α", "measured", ".3f", claims)
    yield Table("G4: ‖C‖ / (T · pairs · H · G), range over seeds, and the task factors claimed", list(factors))
    yield Table("G4: bounds in the weights' spectral norms, range over seeds", list(_network_rows(tables["network"])))


def _exact_rows(tables: Tables) -> Iterator[dict[str, Cell]]:
    for model, rows in _by(tables["one_epoch"], "model"):
        error, largest = (max(row[name] for row in rows) for name in ("error", "largest"))
        yield _exact_row(model, "τ and −η∇L", 1, rows[0]["step"], largest, error)
    for (model, epochs), rows in _by(tables["joint"], "model", "epochs"):
        error, largest = (max(row[name] for row in rows) for name in ("error", "moved"))
        yield _exact_row(model, "θ_TA and θ_MT", epochs, rows[0]["step"], largest, error)


def _exact_row(model: str, what: str, epochs: int, step: float, moved: float, error: float) -> dict[str, Cell]:
    sizes: dict[str, Cell] = {"moved": f"{moved:.1e}", "difference": f"{error:.1e}"}
    return {"model": model, "compared": what, "k": epochs, "η": f"{step:g}", **sizes}


def _slope_rows(rows: Rows) -> Iterator[dict[str, Cell]]:
    for (model, epochs), own in _by(rows, "model", "epochs"):
        slopes: dict[str, Cell] = {label: _range([r[name] for r in own], ".3f") for name, label in SLOPES.items()}
        steps = f"{min(row['from'] for row in own):g} to {max(row['to'] for row in own):g}"
        yield {"model": model, "k": epochs, "α": own[0]["scale"], "η": steps, **slopes}


def _gap_rows(rows: Rows) -> Iterator[dict[str, Cell]]:
    for row in first_seed(rows):
        sizes = {label: f"{row[name]:.2e}" for name, label in SLOPES.items()}
        more = {"coefficient": f"{row['coefficient']:.4f}", "cosine with C": f"{row['aligned']:.4f}"}
        yield {"model": row["model"], "η": f"{row['step']:g}", **sizes, **more, "units switched": row["switched"]}


def _side_by_side(
    rows: Rows, key: str, heading: str, value: str, form: str, claims: Mapping[str, str]
) -> Iterator[dict[str, Cell]]:
    """Yield a row per value of `key`: what each model measured, as a range over seeds, then what is claimed."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    for at, group in _by(sorted(rows, key=lambda row: row[key]), key):
        own: Mapping[str, list[Row]] = dict(_by(group, "model"))
        measured: dict[str, Cell] = {
            model: _range([row[value] for row in own[model]], form) if model in own else None for model in models
        }
        claimed: dict[str, Cell] = {label: f"{group[0][name]:{form}}" for name, label in claims.items()}
        yield {heading: f"{at:.3g}", **measured, **claimed}


def _network_rows(rows: Rows) -> Iterator[dict[str, Cell]]:
    names = {"norm": "‖C‖", "statement": "main text", "appendix": "appendix", "derived": "derived"}
    constants = {f"{name}{kind}": f"{letter}, {word}" for letter, name in _CONSTANTS for kind, word in _KINDS.items()}
    for (model, gain), own in _by(rows, "model", "gain"):
        cells = {label: _range([row[name] for row in own], ".1e") for name, label in names.items()}
        cells |= {label: _range([row[name] for row in own], ".1e") for name, label in constants.items()}
        yield {"model": model, "weights ×": gain, **cells}


def first_seed(rows: Rows) -> list[Row]:
    """Return the rows of each model's first seed."""
    return [row for _, own in _by(rows, "model") for row in own if row["seed"] == own[0]["seed"]]


def _by(rows: Iterable[Row], *names: str) -> list[tuple[Any, list[Row]]]:
    """Group rows by one column, or by several as a tuple, in order of appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        key = row[names[0]] if len(names) == 1 else tuple(row[name] for name in names)
        groups.setdefault(key, []).append(row)
    return list(groups.items())


def _range(values: Sequence[float], form: str) -> str:
    """Return the values' range as text, one number where both ends print the same."""
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"
