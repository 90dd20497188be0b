"""What `mergeflow check` says of a recipe: every problem that headers show, or the plan of the merge."""

from __future__ import annotations

from mergeflow.errors import together
from mergeflow.merging.execution.engine import BUFFER
from mergeflow.merging.files.plan import Plan, check_target, choose_device, make_plan, open_inputs
from mergeflow.merging.files.recipe import AnyRecipe, Resolve, as_recipe


def check_recipe(
    recipe: AnyRecipe, resolve: Resolve | None = None, buffer: int = BUFFER, *, force: bool = False
) -> Plan:
    """Validate a recipe against its files and return the plan of the merge; reads headers only.

    Args:
        recipe, resolve: As `merge` takes them.
        buffer: Bytes the merge may hold beyond its largest stack.
        force: Whether the merge may replace a file that mergeflow did not make.
    """
    recipe, _ = choose_device(as_recipe(recipe), resolve)
    with open_inputs(recipe, resolve) as inputs:
        plans: list[Plan] = []
        together(
            lambda: plans.append(make_plan(recipe, inputs, buffer)),
            lambda: recipe.out is None or check_target(recipe, inputs, force),
        )
        if recipe.adapter is not None:
            from mergeflow.merging.adapters.job import AdapterJob  # imports torch

            AdapterJob(recipe, inputs, plans[0], lambda count: None, None, buffer).check()
        return plans[0]
