"""The choices of the study `unlearning`."""

from typing import Literal

from pydantic import Field

from tasks.project.sections import Section

FORGOTTEN, ALIGNED, LESS_ALIGNED = "harbour", "lighthouse", "orchard"
BOOKS = (FORGOTTEN, ALIGNED, LESS_ALIGNED)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Options(Section):
    """The study's choices.

    Attributes:
        seeds: of the corpus (each has books of its own), the order of the batches and the adapters.
        base: what every fine-tuning starts from, a place as `model.pretrained` of the modality `causal`.
        block: tokens of a block.
        chapters: of each book, the first ones; of ten one is validation and one is test.
        passages: of each book that a model is asked to recite, and questions about its people, the first ones.
        general: texts by other authors that fluency is measured on, of validation and of test.
        together: epochs of fine-tuning on all three books.
        alone: epochs of fine-tuning on one book.
        batch: blocks a step.
        rate: peak learning rate of full fine-tuning.
        adapter_rate: of adapters.
        precision: of fine-tuning, as in the section finetune; gradient ascent is in float32.
        rank: of adapters.
        targets: the layers that adapters are on, by the last part of their names.
        scales: λ, with 0 among them.
        within: how near to the smallest λ that forgets enough the comparison's λ is searched for.
        ascent_rate: of gradient ascent.
        ascent_steps: of gradient ascent, at most; it ends where as much is forgotten as the truth forgets.
        rest: epochs of fine-tuning on the other two books.
        prompt: tokens of a passage that a model is given.
        written: tokens that it writes.
    """

    seeds: list[int] = Field([1, 2, 3, 4, 5], min_length=2)
    base: str = "books"
    block: int = Field(128, ge=8)
    chapters: int = Field(60, ge=10, le=60)
    passages: int = Field(30, ge=1)
    general: int = Field(50, ge=1)
    together: int = Field(5, ge=1)
    alone: int = Field(5, ge=1)
    batch: int = Field(16, ge=1)
    rate: float = Field(2e-3, gt=0)
    adapter_rate: float = Field(6e-3, gt=0)
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    rank: int = Field(32, ge=1)
    targets: list[str] = Field(TARGETS, min_length=1)
    scales: list[float] = Field([0.0, -0.2, -0.4, -0.6, -0.8, -1.0], min_length=2)
    within: float = Field(0.02, gt=0)
    ascent_rate: float = Field(2e-4, gt=0)
    ascent_steps: int = Field(60, ge=1)
    rest: int = Field(1, ge=1)
    prompt: int = Field(16, ge=1)
    written: int = Field(32, ge=1)
