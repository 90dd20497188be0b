"""Merging: the catalog of methods, prepared directions, recipes and the streaming engine."""

from mergeflow.merging.catalog import MethodCall, configure, get, methods
from mergeflow.merging.direction import Direction, prepare
from mergeflow.merging.files.plan import Plan, check_recipe
from mergeflow.merging.files.recipe import Recipe, load_recipe, make_recipe
from mergeflow.merging.files.streaming import Merged, merge
from mergeflow.merging.linalg.cache import FactorCache

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
