"""Write the report's page: results as words, words in a template, written atomically."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from mergeflow.checkpoints.writer import write_atomically
from tasks.plotting.drawing import to_svg
from tasks.plotting.palette import DARK, LIGHT
from tasks.plotting.rows import base_row, experts_behind_base, model_name
from tasks.project.recorded import check_outputs
from tasks.report.files import READ, RunFiles, read_run
from tasks.report.pictures import base_facts, decision_figure, drawings, inline, lineage_figure, origin
from tasks.report.tables import (
    Table,
    arguments_text,
    candidates_table,
    cost_table,
    gates_table,
    lineage_table,
    results_table,
)
from tasks.report.texts import OF_TEXTS, texts_table, unlearned_table

_PARTS = Path(__file__).parent


@dataclass(frozen=True)
class Fact:
    """One figure of the page's head: what it is, its value, and a remark."""

    title: str
    value: str
    remark: str = ""


def write_report(root: Path, target: Path) -> Path:
    """Write the report of the run in `root` as one HTML file that needs no network.

    The page is a view: it is made from what the stages wrote and from nothing else, so the same files give the same
    bytes. Figures, cost records and the registration are shown where they exist.
    """
    check_outputs(root, "the report", READ)
    run = read_run(root)
    page = render(run, texts_table(root, run), unlearned_table(root, run))
    write_atomically(target, page)
    return target


def render(run: RunFiles, texts: Table | None = None, unlearned: Table | None = None) -> str:
    environment = Environment(
        loader=FileSystemLoader(_PARTS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    winner, registration = run.selection["winner"], run.registration
    decision = registration.get("decision") if registration else None
    return environment.get_template("page.html.jinja").render(
        run=run,
        winner=winner,
        facts=_facts(run),
        source=_about(run),
        embedded=_embedded(run),
        of_texts=run.params.get("model", {}).get("modality") in OF_TEXTS,
        error=_standard_error(run),
        edges=[(name, choice) for name, choice in run.selection["methods"].items() if choice.get("at_grid_edge")],
        results=results_table(run),
        candidates={method: candidates_table(run, method) for method in run.sweeps},
        texts=texts,
        unlearned=unlearned,
        lineage=lineage_table(run),
        costs=cost_table(run) if run.costs else None,
        started=_started(run),
        registration=registration,
        decision=decision,
        lineage_picture=_picture("lineage", "Lineage: data, experts, merge, registered version", lineage_figure(run)),
        origin=origin(run),
        decision_picture=_picture("decision", "Change against the champion", decision_figure(decision)),
        gates=gates_table(decision) if decision and decision.get("gates") else None,
        drawings=drawings(run.figures),
        recipe=_recipe(run.selection["methods"][winner]),
        theme=Markup("").join(_theme()),
        style=Markup((_PARTS / "page.css").read_text(encoding="utf-8")),
        script=Markup((_PARTS / "page.js").read_text(encoding="utf-8")),
    )


def _picture(name: str, label: str, figure: Figure | None) -> Markup:
    return Markup(inline(name, to_svg(figure, label).decode()) if figure else "")


def _recipe(choice: Mapping[str, Any]) -> str:
    """Return the recipe of a chosen merge as `mergeflow merge` reads it; fingerprints are remarks there."""
    recipe = dict(choice["recipe"])
    fingerprints = recipe.pop("fingerprints", {})
    recipe["out"] = "merged.safetensors"
    remarks = [f"# expert {task}: {fingerprint}" for task, fingerprint in fingerprints.items()]
    remarks.append(f"# the merge: {choice['fingerprint']}")
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True) + "\n".join(remarks)


def _facts(run: RunFiles) -> list[Fact]:
    rows = {row["name"]: row for row in run.test["rows"]}
    winner = rows[run.selection["winner"]]
    experts, base = rows["individual"], base_row(run.test["rows"])
    name = Markup("_<wbr>").join(winner["name"].split("_"))  # a long one breaks there, not within a word
    facts = [
        Fact("Best merge, by validation", name, arguments_text(winner["args"])),
        Fact(
            "Mean test accuracy",
            f"{100 * winner['mean']:.1f} %",
            f"from {100 * base['mean']:.1f} % ({model_name(base['name'])}); "
            f"the experts have {100 * experts['mean']:.1f} %",
        ),
        Fact("Normalised", f"{100 * winner['normalised']:.1f} %", "of the experts' accuracy, mean over the tasks"),
    ]
    behind = experts_behind_base(run.test["rows"])
    if behind:
        facts.append(Fact("Experts no better than the base", str(len(behind)), ", ".join(behind)))
    if "average" in rows and winner["name"] != "average":
        gain = 100 * (winner["mean"] - rows["average"]["mean"])
        facts.append(Fact("Over averaging", f"{gain:+.1f} points".replace("-", "−"), "of mean test accuracy"))
    return facts


def _about(run: RunFiles) -> list[tuple[str, str]]:
    model, tasks = run.params.get("model", {}), run.selection["tasks"]
    sources = sorted({str(source) for source in run.params.get("tasks", {}).values()})
    facts = [
        ("Tasks", f"{len(tasks)}: {', '.join(tasks)}"),
        ("Sources", ", ".join(sources)),
        ("Base", f"{model.get('modality', 'vision')}: {', '.join(base_facts(model))}"),
        ("Seed", str(run.params.get("seed", 0))),
    ]
    if run.costs:
        facts.append(("Stages ran", _started(run)))
    return facts


def _embedded(run: RunFiles) -> list[str]:
    sources = (str(source).partition(":") for source in run.params.get("tasks", {}).values())
    return sorted({name for kind, _, name in sources if kind == "suite"})


def _standard_error(run: RunFiles) -> float | None:
    """Return the standard error of the winner's mean test accuracy in points: √(Σ p(1−p)/n) / T.

    None where a task has another figure, as the variance of a correlation or F1 does not follow from its value, and
    for causal models, whose examples are blocks of many tokens.
    """
    if run.test.get("metrics") or run.params.get("model", {}).get("modality") == "causal":
        return None
    winner: Mapping[str, Any] = next(row for row in run.test["rows"] if row["name"] == run.selection["winner"])
    accuracy, examples = winner["accuracy"], run.test["examples"]
    return 100 * math.sqrt(sum(p * (1 - p) / examples[task] for task, p in accuracy.items())) / len(accuracy)


def _started(run: RunFiles) -> str:
    if not run.costs:
        return ""
    first, last = run.costs[0]["started"], max(record["started"] + record["seconds"] for record in run.costs)
    begin, end = (datetime.fromtimestamp(moment, UTC) for moment in (first, last))
    day = "" if begin.date() == end.date() else f"{end:%Y-%m-%d} "
    return f"{begin:%Y-%m-%d %H:%M} to {day}{end:%H:%M} UTC"


def _theme() -> list[Markup]:
    """Return the colours as CSS variables, for a light and a dark page."""

    def block(colours: Mapping[str, str]) -> str:
        return ":root{" + "".join(f"--{role}:{colour};" for role, colour in colours.items()) + "}"

    return [Markup(block(LIGHT)), Markup("@media (prefers-color-scheme:dark){" + block(DARK) + "}")]
