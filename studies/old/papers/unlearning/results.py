"""The study's tables and findings, from its rows alone. The rules were written before the first run."""

from collections.abc import Sequence

from studies.old.claims import judge, paired
from studies.old.papers.unlearning.options import ALIGNED, BOOKS, FORGOTTEN, LESS_ALIGNED, Options
from studies.old.results import Cell, Finding, StudyResult, Table, with_interval
from studies.old.rows import Row, of, tidy
from suites.books.suite import GENERAL

RISE = 0.5  # nat of log-perplexity
WORSE, BETTER = -5.0, 5.0  # points of the drop in Rouge-L
FALLS = {FORGOTTEN: 17.7, ALIGNED: 12.0}  # % of Rouge-L: half of the smaller in the paper's Tables 3 and 4
ALPHA = 0.05
KEPT = 0.1  # nat of log-perplexity, at equal forgetting
WAYS = {"full": "all weights", "adapters": "adapters"}
_MEASURES = ("test", "recall", "f1", "exact", "facts")


def values(rows: Sequence[Row], measure: str, **wanted: object) -> list[float]:
    """Return a measure of the rows with these values, seed by seed.

    Args:
        rows: of all seeds.
        measure: a column.
        wanted: column to value.
    """
    return [float(row[measure]) for row in of(rows, **wanted)]


def drops(rows: Sequence[Row], way: str, book: str, scale: float, measure: str = "recall") -> list[float]:
    """Return 100 · (m(0) − m(λ)) / m(0) of a measure of a book, seed by seed.

    Args:
        rows: of all seeds.
        way: how τ was trained, one of `WAYS`.
        book: its title.
        scale: λ.
        measure: m, such as `recall`.
    """
    start, end = (values(rows, measure, way=way, book=book, scale=one) for one in (0.0, scale))
    return [100 * (one - other) / one if one else 0.0 for one, other in zip(start, end, strict=True)]


def rises(rows: Sequence[Row], way: str, book: str, scale: float) -> list[float]:
    """Return the rise in log-perplexity from λ = 0, in nats, seed by seed.

    Args:
        rows: of all seeds.
        way: how τ was trained, one of `WAYS`.
        book: its title.
        scale: λ.
    """
    return paired(*(values(rows, "test", way=way, book=book, scale=one) for one in (scale, 0.0)))


def chosen(rows: Sequence[Row], way: str, options: Options) -> dict[int, float]:
    """Return, by seed, the measured λ nearest to 0 that forgets on validation as much as the truth; else the last.

    Args:
        rows: of all seeds.
        way: how τ was trained, one of `WAYS`.
        options: the study's choices.
    """
    found = {}
    for seed in options.seeds:
        (until,) = values(rows, "validation", way="without", book=FORGOTTEN, seed=seed)
        measured = {row["scale"]: row["validation"] for row in of(rows, way=way, book=FORGOTTEN, seed=seed)}
        enough = (scale for scale in sorted(measured, key=abs) if measured[scale] >= until)
        found[seed] = next(enough, max(options.scales, key=abs))
    return found


def study_result(rows: Sequence[Row], options: Options) -> StudyResult:
    """Return the study's result."""
    last = min(options.scales)
    tables = [_scale_table(rows, way, options) for way in WAYS]
    tables += [_ways_table(rows, options), _likeness_table(rows)]
    found = [finding for way in WAYS for finding in (*_forgets(rows, way, options), *_order(rows, way, last))]
    return StudyResult(tables, [*found, _alpha(rows), *_against(rows, options)], _notes(rows, options), tidy(rows))


def _forgets(rows: Sequence[Row], way: str, options: Options) -> list[Finding]:
    """What the paper says of λ becoming negative: Rouge-L of two books falls, and lowest at the smallest λ."""
    last = min(options.scales)
    between = [scale for scale in options.scales if last < scale < 0]
    at = {scale: drops(rows, way, FORGOTTEN, scale) for scale in (*between, last)}
    others = [max(of_seed) for of_seed in zip(*(at[scale] for scale in between), strict=True)]
    where = f"λ = {last:g}, {WAYS[way]}"
    found = [
        judge(
            "P18",
            f"As λ becomes negative, Rouge-L recall of {words} decreases significantly ({where}).",
            {f"drop of {book}": drops(rows, way, book, last)},
            f"by ≥ {FALLS[book]:g} % of what it was, half of the smaller drop in the paper's Tables 3 and 4",
            low=FALLS[book],
            unit=" %",
        )
        for book, words in ((FORGOTTEN, "the forgotten book"), (ALIGNED, "the same author's book"))
    ]
    found.append(
        judge(
            "P18",
            f"The forgotten book is forgotten best at the smallest λ ({where}).",
            {"drop there less the largest at another λ": paired(at[last], others)} if others else {},
            "paired difference of the drop in Rouge-L recall ≥ 0 points",
            low=0,
        )
    )
    return found


def _order(rows: Sequence[Row], way: str, last: float) -> list[Finding]:
    rise = {book: rises(rows, way, book, last) for book in BOOKS}
    drop = {book: drops(rows, way, book, last) for book in BOOKS}
    where = f"λ = {last:g}, {WAYS[way]}"
    return [
        judge(
            "P18",
            f"The forgotten book's perplexity rises most, the same author's less, the other's least ({where}).",
            {
                f"{FORGOTTEN} less {ALIGNED}": paired(rise[FORGOTTEN], rise[ALIGNED]),
                f"{ALIGNED} less {LESS_ALIGNED}": paired(rise[ALIGNED], rise[LESS_ALIGNED]),
            },
            f"rise of the log-perplexity larger by ≥ {RISE} nat each",
            low=RISE,
            unit=" nat",
            digits=2,
            ours=True,
        ),
        judge(
            "P18",
            f"Rouge-L recall of the forgotten book drops at least as far as the same author's ({where}).",
            {f"drop of {FORGOTTEN} less that of {ALIGNED}": paired(drop[FORGOTTEN], drop[ALIGNED])},
            f"not less by more than {-WORSE:g} points",
            low=WORSE,
        ),
        *(
            judge(
                "P18",
                f"Rouge-L recall of {words} drops further than the other author's ({where}).",
                {f"drop of {book} less that of {LESS_ALIGNED}": paired(drop[book], drop[LESS_ALIGNED])},
                f"by ≥ {BETTER:g} points",
                low=BETTER,
            )
            for book, words in ((FORGOTTEN, "the forgotten book"), (ALIGNED, "the same author's book"))
        ),
    ]


def _alpha(rows: Sequence[Row]) -> Finding:
    near, far = (values(rows, "alpha", way="likeness", book=book) for book in (ALIGNED, LESS_ALIGNED))
    return judge(
        "P19",
        "Experts of two books by one author are more correlated than those of books by two.",
        {f"α̂ with {ALIGNED} less α̂ with {LESS_ALIGNED}": paired(near, far)},
        f"by ≥ {ALPHA}",
        low=ALPHA,
        unit="",
        digits=3,
    )


def _against(rows: Sequence[Row], options: Options) -> list[Finding]:
    found = []
    for way, told in WAYS.items():
        scales = chosen(rows, way, options)
        more = {
            book: [
                values(rows, "test", way="ascent", book=book, seed=seed)[0]
                - values(rows, "test", way=way, book=book, scale=scale, seed=seed)[0]
                for seed, scale in scales.items()
            ]
            for book in (ALIGNED, LESS_ALIGNED, GENERAL)
        }
        found.append(
            judge(
                "P21",
                f"Where both forget as much as re-training without the book, negation ({told}) keeps more than ascent.",
                {f"log-perplexity of {book} after ascent less after negation": gaps for book, gaps in more.items()},
                f"by ≥ {KEPT} nat each; λ and steps chosen on validation",
                low=KEPT,
                unit=" nat",
                digits=2,
                ours=True,
            )
        )
    return found


def _scale_table(rows: Sequence[Row], way: str, options: Options) -> Table:
    made: list[dict[str, Cell]] = []
    for scale in sorted(options.scales, reverse=True):
        for book in (*BOOKS, GENERAL):
            measures = _MEASURES if book != GENERAL else ("test",)
            cells = {
                name: with_interval(values(rows, name, way=way, book=book, scale=scale))
                for name in measures
                if name != "test"
            }
            drop = "" if book == GENERAL or not scale else with_interval(drops(rows, way, book, scale))
            entropy = with_interval(values(rows, "test", way=way, book=book, scale=scale), 2)
            made.append(
                {"λ": f"{scale:g}", "text": book, "log-perplexity": entropy, **_named(cells), "drop of recall, %": drop}
            )
    return Table(f"Ψ⁰′ + λτ, {WAYS[way]}", made)


def _ways_table(rows: Sequence[Row], options: Options) -> Table:
    made: list[dict[str, Cell]] = []
    picks: list[tuple[str, str, dict[int, float | None]]] = [
        (way, f"negation, {told}, λ by validation", dict(chosen(rows, way, options))) for way, told in WAYS.items()
    ]
    plain: dict[int, float | None] = dict.fromkeys(options.seeds)
    names = {
        "together": "before",
        "without": "re-trained without it",
        "ascent": "gradient ascent",
        "rest": "tuned on the rest",
    }
    for way, told, scales in [*((way, told, plain) for way, told in names.items()), *picks]:
        for book in (*BOOKS, GENERAL):
            measures = _MEASURES if book != GENERAL else ("test",)
            found = {
                name: [
                    values(rows, name, way=way, book=book, scale=scale, seed=seed)[0] for seed, scale in scales.items()
                ]
                for name in measures
            }
            cells = {name: with_interval(one) for name, one in found.items() if name != "test"}
            made.append(
                {"model": told, "text": book, "log-perplexity": with_interval(found["test"], 2), **_named(cells)}
            )
    return Table("At equal forgetting", made)


def _named(cells: dict[str, str]) -> dict[str, str]:
    names = {
        "recall": "Rouge-L recall, %",
        "f1": "Rouge-L F1, %",
        "exact": "exact tokens",
        "facts": "facts answered, %",
    }
    return {told: cells.get(name, "") for name, told in names.items()}


def _likeness_table(rows: Sequence[Row]) -> Table:
    made = [
        {"pair": f"{FORGOTTEN}, {book}", "α̂": with_interval(values(rows, "alpha", way="likeness", book=book), 3)}
        for book in (ALIGNED, LESS_ALIGNED)
    ]
    return Table("Correlation of experts", [dict(row) for row in made])


def _notes(rows: Sequence[Row], options: Options) -> list[str]:
    told = []
    for way in WAYS:
        scales = ", ".join(f"{scale:.3g}" for scale in chosen(rows, way, options).values())
        told.append(f"λ chosen on validation, {WAYS[way]}: {scales}.")
    steps = [row["steps"] for row in rows if row.get("steps") and row["book"] == FORGOTTEN]
    return [*told, f"Gradient ascent took {', '.join(map(str, steps))} steps of at most {options.ascent_steps}."]
