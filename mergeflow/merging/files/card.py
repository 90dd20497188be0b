"""The model card that stands beside a merged model."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from mergeflow.merging.files.place import CARD_HEAD
from mergeflow.merging.files.recipe import Recipe
from mergeflow.merging.files.step_fields import PREFIX

if TYPE_CHECKING:
    from mergeflow.merging.files.plan import Plan


def model_card(
    recipe: Recipe, plan: "Plan", result: str, inputs: Mapping[str, str], version: str, notes: Iterable[str] = ()
) -> str:
    """Return the card: what was merged, how, with which fingerprints, and how to make it again.

    Args:
        recipe: The complete recipe.
        plan: What it does.
        result: Fingerprint of the result.
        inputs: Fingerprint of each input that was read whole.
        version: Of mergeflow.
        notes: What else there is to say of the result.
    """
    method = plan.call.method
    paths = {
        "base": recipe.base or "none: the first expert",
        **dict(recipe.experts),
        **dict(recipe.task_vectors),
    }
    for name, step in recipe.steps or ():
        if isinstance(step, Recipe):
            own = {"base": step.base or "none: the first expert", **dict(step.experts), **dict(step.task_vectors)}
            paths |= {f"{PREFIX}{name}/{owner}": path for owner, path in own.items()}
    rows = "\n".join(f"| {name} | `{paths[name]}` | `{inputs.get(name, 'not read whole')}` |" for name in paths)
    again = json.dumps(json.loads(recipe.record()), indent=2, ensure_ascii=False)
    treatment = "\n".join(["```", *plan.treatment.lines(), "```\n"]) if plan.treatment.treated else ""
    more = "\n".join(["```", *notes, "```\n"]) if notes else ""
    return f"""{CARD_HEAD}tags: [model-merging, {recipe.method}]
---
# Merged model: {recipe.method} of {len(plan.experts)} experts

{method.summary}

```
{method.section("")}
```

Source: {" ".join(method.section("Source").split())}

| input | path | fingerprint |
|---|---|---|
{rows}

Fingerprint of the result: `{result}`.
{plan.tensors} tensors, {plan.parameters:,} parameters. Made by mergeflow {version}.
{treatment}{more}
To make it again, save this as `recipe.json` and run `mergeflow merge recipe.json`:

```json
{again}
```
"""
