"""pocket8, pocket14 and pocket20, after benchmarks of 8, 14 and 20 tasks, each extending the last; pocket-digits."""

from suites.pocket.core import Suite, SuiteTask
from suites.pocket.drawn import (
    aerial,
    digits,
    faces,
    fashion,
    flowers,
    food,
    kana,
    land,
    letters,
    objects,
    pets,
    reviews,
    scenes,
    signs,
    street,
    textures,
    thumbnails,
    tissue,
    vehicles,
    wildlife,
)

_TASKS: tuple[SuiteTask, ...] = (
    digits.TASK,
    street.TASK,
    signs.TASK,
    textures.TASK,
    land.TASK,
    aerial.TASK,
    scenes.TASK,
    vehicles.TASK,
    objects.TASK,
    faces.TASK,
    flowers.TASK,
    pets.TASK,
    tissue.TASK,
    wildlife.TASK,
    letters.TASK,
    thumbnails.TASK,
    food.TASK,
    fashion.TASK,
    reviews.TASK,
    kana.TASK,
)

DIGITS = Suite("pocket-digits", {"digits": digits.DRAWN})
POCKETS = tuple(Suite(f"pocket{count}", {task.name: task for task in _TASKS[:count]}) for count in (8, 14, 20))
