"""Prefect artifacts: what a person wants to see of a run on the server's page."""

from pathlib import Path
from typing import TYPE_CHECKING

from prefect import get_run_logger
from prefect.artifacts import create_link_artifact, create_markdown_artifact

from flows.plan import registration_lost
from mergeflow import layout
from mergeflow.documents import Test, read_registration, read_test

if TYPE_CHECKING:
    from registry.gates import Decision
    from registry.store import Store


def publish_results(root: Path) -> None:
    """Publish result table, gates' decision, links to the report and to MLflow's run, as far as there are any."""
    test, registration = root / layout.TEST, root / layout.REGISTRATION
    if test.exists():
        create_markdown_artifact(results_table(read_test(test)), "results", "Test accuracy in %")
    report = root / layout.REPORT
    if report.exists():
        create_link_artifact(report.resolve().as_uri(), "report.html", "report", f"On the worker, {report.resolve()}")
    if registration.exists() and not registration_lost(root):
        from registry.store import connect

        found = read_registration(registration)
        decision = found["decision"] or {"promote": None, "reasons": []}
        store = connect(project_root=root)
        _publish(found["model"], found["version"], found["champion"], decision["promote"], decision["reasons"])
        _link_run(store, found["model"], found["version"])


def publish_decision(
    store: "Store", model: str, version: str, champion: str | None, decision: "Decision | None"
) -> None:
    """Publish what the gates said of a version, with a link to its run.

    Args:
        store: the registry.
        model: the registered model.
        version: its number.
        champion: the number of the champion now; None where there is none.
        decision: what the gates said; None for a version that was champion already.
    """
    promote, reasons = (decision.promote, decision.reasons) if decision else (None, [])
    _publish(model, version, champion, promote, reasons)
    _link_run(store, model, version)


def results_table(test: Test) -> str:
    """Return the table task × method on the locked test set as Markdown: accuracy in percent, the winner in bold."""
    rows = test["rows"]
    names = [f"**{row['name']}**" if row["name"] == test["winner"] else row["name"] for row in rows]
    lines = [["task", *names], ["---", *("---:" for _ in rows)]]
    lines += [[task, *(f"{100 * row['accuracy'][task]:.1f}" for row in rows)] for task in test["tasks"]]
    lines += [[key, *(f"{100 * row[key]:.1f}" for row in rows)] for key in ("mean", "normalised")]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _publish(model: str, version: str, champion: str | None, promote: bool | None, reasons: list[str]) -> None:
    answer = {True: "passed the gates", False: "refused", None: "was champion already"}[promote]
    lines = [f"**{model} version {version}: {answer}.**", "", *(f"- {reason}" for reason in reasons)]
    lines += ["", f"Champion: version {champion}" if champion else "No champion."]
    create_markdown_artifact("\n".join(lines), "decision", f"{model} version {version}: {answer}")
    get_run_logger().info("%s version %s %s; champion is version %s", model, version, answer, champion)


def _link_run(store: "Store", model: str, version: str) -> None:
    from registry.lookup import find_version

    run_id = find_version(store, model, version).run_id
    if run_id and store.uri.startswith("http"):
        page = f"{store.uri.rstrip('/')}/#/experiments/{store.experiment_id}/runs/{run_id}"
        create_link_artifact(page, "the run in MLflow", "mlflow-run")
