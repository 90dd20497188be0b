"""The model card that stands beside a merged model."""

import json
from collections.abc import Iterable, Mapping

from mergeflow.merging.files.front_matter import as_yaml, front_matter_of, licences_of, owners_of
from mergeflow.merging.files.inputs import Inputs
from mergeflow.merging.files.place import CARD_HEAD
from mergeflow.merging.files.plan import Plan
from mergeflow.merging.files.published import published
from mergeflow.merging.files.recipe import Recipe
from mergeflow.merging.files.step_fields import PREFIX


def model_card(
    recipe: Recipe,
    plan: Plan,
    opened: Inputs,
    result: str,
    inputs: Mapping[str, str],
    version: str,
    notes: Iterable[str] = (),
) -> str:
    """Return the card: what was merged, how, with which fingerprints, and how to make it again.

    Args:
        recipe: The complete recipe.
        plan: What it does.
        opened: The opened inputs.
        result: Fingerprint of the result.
        inputs: Fingerprint of each input that was read whole.
        version: Of mergeflow.
        notes: What else there is to say of the result.
    """
    method, public = plan.call.method, published(recipe)
    again = json.dumps(json.loads(public.record()), indent=2, ensure_ascii=False)
    treatment = "\n".join(["```", *plan.treatment.lines(), "```\n"]) if plan.treatment.treated else ""
    more = "\n".join(["```", *notes, "```\n"]) if notes else ""
    warnings = "\n".join(["The inputs differ beside their weights:\n", *(f"- {one}" for one in opened.warnings), "\n"])
    return f"""{CARD_HEAD}{as_yaml(front_matter_of(recipe, opened))}---
# Merged model: {recipe.method} of {len(plan.experts)} experts

{method.summary}

```
{method.section("")}
```

Source: {" ".join(method.section("Source").split())}

{diagram(public, plan)}
{_table(public, recipe, opened, inputs)}

Fingerprint of the result: `{result}`.
{plan.tensors} tensors, {plan.parameters:,} parameters. Made by mergeflow {version}.
{treatment}{more}
{warnings if opened.warnings else ""}\
To make it again, save this as `recipe.json` in a folder that has the inputs by these names, and run
`mergeflow merge recipe.json`:

```json
{again}
```
"""


def _table(public: Recipe, recipe: Recipe, opened: Inputs, inputs: Mapping[str, str]) -> str:
    licences = licences_of(recipe, opened)
    rows = ["| input | name | licence | fingerprint |", "|---|---|---|---|"]
    for name, path in owners_of(public).items():
        licence = licences.get(name, {})
        told = licence.get("license_name", licence.get("license", ""))
        rows.append(f"| {_cell(name)} | `{_cell(path)}` | {_cell(told)} | `{inputs.get(name, 'not read whole')}` |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def diagram(recipe: Recipe, plan: Plan) -> str:
    """Return the recipe as a diagram that the Hub and GitHub draw (Mermaid)."""
    weights = {name: str(weight) for name, weight in recipe.expert_weights().items() if weight != 1}
    weights |= dict.fromkeys(recipe.varied_weights(), "by depth or name")
    args = ", ".join(f"{key} {value}" for key, value in plan.call.args.items())
    lines = [f'  merge{{{{"{_label(recipe.method)}<br>{_label(args)}"}}}} --> result(["result"])']
    vectors, steps = dict(recipe.task_vectors), {PREFIX + name for name, _ in recipe.steps or ()}
    if recipe.base is not None:
        lines.insert(0, f'  base["base{_of(recipe.base, steps)}"] --> merge')
    paths = {**dict(recipe.experts), **vectors}
    for number, name in enumerate(plan.experts):
        kind = " (task vector)" if name in vectors else _of(paths[name], steps)
        edge = f'-- "{_label(weights[name])}" -->' if name in weights else "-->"
        lines.append(f'  expert{number}["{_label(name)}{kind}"] {edge} merge')
    return "\n".join(["```mermaid", "graph LR", *lines, "```", ""])


def _of(path: str, steps: set[str]) -> str:
    return f" ({_label(path)})" if path in steps else ""


def _label(text: str) -> str:
    """Return text as it may stand in quotes of a diagram."""
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")
