"""Merging: the catalog of methods, prepared directions, recipes and the streaming engine."""

from mergeflow.merging.cache import FactorCache
from mergeflow.merging.catalog import MethodCall, configure, get, methods
from mergeflow.merging.direction import Direction, prepare
from mergeflow.merging.plan import Plan, check_recipe
from mergeflow.merging.recipe import Recipe, load_recipe, make_recipe
from mergeflow.merging.streaming import Merged, merge

__all__ = [
    "Direction",
    "FactorCache",
    "Merged",
    "MethodCall",
    "Plan",
    "Recipe",
    "check_recipe",
    "configure",
    "get",
    "load_recipe",
    "make_recipe",
    "merge",
    "methods",
    "prepare",
]
