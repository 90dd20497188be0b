"""A world: one base and the tasks on it. The project has one in params.yaml, the studies of many tasks their own."""

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """Where a world's files lie, and which parameters describe it.

    Attributes:
        folder: holds `base` and `data`.
        runs: folder of the studies' training runs.
        train: name of the stage that makes them.
        prefix: what stands before the keys of its parameters `tasks`, `model`, `data` and `runs`.
    """

    folder: str
    runs: str
    train: str
    prefix: str


WORLDS = {
    "project": World("outputs", "outputs/studies/runs", "train", ""),
    "many": World("outputs/many", "outputs/many/runs", "many_train", "studies/params.yaml:many."),
}
