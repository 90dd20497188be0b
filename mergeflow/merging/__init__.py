"""Merging: the catalog of methods, prepared directions, recipes and the streaming engine."""

from mergeflow.merging.cache import FactorCache
from mergeflow.merging.catalog import MethodCall, configure, get, methods
from mergeflow.merging.direction import Direction, prepare

__all__ = ["Direction", "FactorCache", "MethodCall", "configure", "get", "methods", "prepare"]
