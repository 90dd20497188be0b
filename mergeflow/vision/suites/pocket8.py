"""pocket8: eight tasks that mirror the field's standard benchmark of eight."""

from mergeflow.vision.suites.core import Suite
from mergeflow.vision.suites.drawn import aerial, digits, land, scenes, signs, street, textures, vehicles

_MODULES = (digits, street, signs, textures, land, aerial, scenes, vehicles)

POCKET8 = Suite("pocket8", {module.TASK.name: module.TASK for module in _MODULES})
