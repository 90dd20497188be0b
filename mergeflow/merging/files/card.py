"""The model card that stands beside a merged model."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mergeflow.merging.files.place import CARD_HEAD
from mergeflow.merging.files.recipe import Recipe

if TYPE_CHECKING:
    from mergeflow.merging.files.plan import Plan


def model_card(recipe: Recipe, plan: "Plan", result: str, inputs: Mapping[str, str], version: str) -> str:
    """Return the card: what was merged, how, with which fingerprints, and how to make it again."""
    method = plan.call.method
    paths = {
        "base": recipe.base or "none: the first expert",
        **dict(recipe.experts),
        **dict(recipe.task_vectors),
    }
    rows = "\n".join(f"| {name} | `{paths[name]}` | `{inputs[name]}` |" for name in paths)
    again = json.dumps(json.loads(recipe.record()), indent=2, ensure_ascii=False)
    treatment = "\n".join(["```", *plan.treatment.lines(), "```\n"]) if plan.treatment.treated else ""
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
{treatment}
To make it again, save this as `recipe.json` and run `mergeflow merge recipe.json`:

```json
{again}
```
"""
