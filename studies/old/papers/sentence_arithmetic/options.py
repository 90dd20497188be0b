"""The choices of the study `sentence_arithmetic`."""

from pydantic import Field

from studies.lab.tuning import CosineSteps
from suites.sentences.suite import COUNTS
from tasks.project.sections import Section


class Options(Section):
    """The study's choices.

    Attributes:
        seeds: of the texts and of the order of the batches.
        base: what every fine-tuning starts from, a place as `model.pretrained` of the modality `text`.
        pooling: what a head sees of a text, as `model.pooling` of that modality.
        max_length: tokens of a text.
        train: texts that each expert learns from.
        validation: texts of each task that λ is chosen on.
        test: texts of each task that are looked at once.
        tune: of each expert; joint training takes as many steps of each task.
        scales: λ of what is added, and of analogies.
        negated: λ of what is taken away; 0 is tried as well.
    """

    seeds: list[int] = Field(min_length=1)
    base: str = "sentences8"
    pooling: str = Field("mean", pattern="^(mean|first)$")
    max_length: int = Field(64, ge=8)
    train: int = Field(COUNTS["train"], ge=8)
    validation: int = Field(COUNTS["validation"], ge=2)
    test: int = Field(COUNTS["test"], ge=2)
    tune: CosineSteps
    scales: list[float] = Field(min_length=1)
    negated: list[float] = Field(min_length=1)
