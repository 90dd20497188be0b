"""The choices of the study `language_arithmetic`."""

from typing import Any

from pydantic import Field, field_validator

from mergeflow.search.candidates import grid_of
from studies.lab.tuning import CosineSteps
from studies.old.papers.language_arithmetic.world import Folders
from tasks.project.sections import Section

PLAIN = ("average", "task_arithmetic")  # methods that treat no interference


class Options(Section):
    """The study's choices.

    Attributes:
        seeds: of the texts and of the order of the batches.
        base: what every fine-tuning starts from, a place as `model.pretrained` of the modality `causal`.
        block: tokens of a block.
        folders: texts of your own in place of the generated ones; the seed is then that of the batches alone.
        train: texts that each expert learns from; of a folder the first so many files.
        validation: texts of each task that λ and the methods' arguments are chosen on.
        test: texts of each task that are looked at once.
        tune: of each expert; joint training takes as many steps as the experts together.
        scales: λ of the analogies and of what they are held against.
        methods: name in the catalog → argument → the values to try.
    """

    seeds: list[int] = Field(min_length=1)
    base: str = "books"
    block: int = Field(128, ge=8)
    folders: Folders | None = None
    train: int = Field(ge=1)
    validation: int = Field(ge=1)
    test: int = Field(ge=1)
    tune: CosineSteps
    scales: list[float] = Field(min_length=1)
    methods: dict[str, dict[str, list[Any]]] = Field(min_length=1)

    @field_validator("methods")
    @classmethod
    def _taken(cls, methods: dict[str, dict[str, list[Any]]]) -> dict[str, dict[str, list[Any]]]:
        for name, values in methods.items():
            grid_of(name, values)
        if "task_arithmetic" not in methods or not methods.keys() - PLAIN:
            raise ValueError(
                f"found {', '.join(methods)}; expected task_arithmetic and a method that treats interference, such as "
                "ties: a finding compares them"
            )
        return methods
