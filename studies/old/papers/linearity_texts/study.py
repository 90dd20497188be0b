"""Study `linearity_texts` (L10–L13, L16, L20): are an encoder-decoder's features linear in edits of its weights?

**Question.** The paper adds and negates task vectors of a T5 that was tuned on six text-to-text tasks, and finds the
features of its encoder and decoder linear. Is it so for a small T5 from nothing? And what every study of linearity
stands on: are a model and its task vector the same thing, does a feature depend on its text alone, and do the samples
that are kept give the tables again?

**Method.** A T5 is pre-trained to repeat rows of symbols and tuned on six edits of them (reversed, sorted, each symbol
replaced by the next, rotated, neighbours swapped, every second one), each with AdamW. *Edits*: Equations 2, 3 and 4 as
in the study linearity_edits, at each block (the rule of Equation 4 has no baseline and is laxer than that of the other
two, by which λ = 0.2 would be undecided): the encoder's features are means over the tokens
that are not padding, the decoder's are those with which it generates the first token. *Vectors* (L10): θ0 + 1·τ_t by
the files that `mergeflow vector` writes, against θ_t, in float32 and bfloat16, in units of the last place of the larger
of |θ0| and |θ_t|. *Features* (L16): of the same texts one at a time and in batches of 7 and of all, backwards; the
largest difference in shares of the feature's length. *Samples* (L20): the means of the file that this study keeps,
against its rows. The embedded model shows the arithmetic on T5's code; published checkpoints take its place by
`checkpoints`, as [the example of linearity](../../examples/linearity/studies.yaml) does for T5-base. Margins are ours
and were written before the run.

**Source.** Zhou et al. 2024, Cross-Task Linearity, Section 4.3, B.1.3, Figures 21 and 24; Ni et al. 2022, Sentence-T5.
"""

from functools import partial
from typing import Self

from pydantic import Field, model_validator

from mergeflow.evaluation.accuracy import accuracies
from mergeflow.evaluation.averages import mean
from studies.lab.linear_rows import TunedModels, read_samples, samples_file, write_samples
from studies.old.papers.linearity_edits.study import examples_of, measure_edits
from studies.old.papers.linearity_texts.checkpoints import Checkpoints, open_checkpoints
from studies.old.papers.linearity_texts.identities import feature_rows, sample_rows, vector_rows
from studies.old.papers.linearity_texts.results import findings, tables
from studies.old.papers.linearity_texts.world import TextWorld, train_texts
from studies.old.pieces import kept_by_seed
from studies.old.results import StudyResult
from studies.old.rows import Row, tidy
from tasks.plotting.linearity import linearity_figure
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO


class Options(Section):
    """The study's choices.

    world: a model from nothing; or checkpoints: published ones. texts: of each task. scale: λ at which Equations 2 and
    3 are judged. scales: λ of 3 and 4. seeds: of weights, rows and orders; of checkpoints one.
    """

    world: TextWorld | None = None
    checkpoints: Checkpoints | None = None
    texts: int = Field(ge=32)
    scale: float = Field(gt=0)
    scales: list[float] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.world is None) == (self.checkpoints is None):
            raise ValueError("takes either `world` or `checkpoints`")
        return self


DECLARED = Declaration(Options, systems=("L10", "L11", "L12", "L13", "L16", "L20"))


def run(io: StageIO) -> None:
    """Write `outputs/studies/linearity_texts`."""
    options = DECLARED.chosen(io)
    pieces = kept_by_seed(io, options.seeds, partial(measure, io, options))
    rows = {key: [row for piece in pieces for row in piece[key]] for key in pieces[0]}
    kept = read_samples(samples_file(io, options.seeds[0]))
    result = StudyResult(
        tables(rows),
        findings(rows, options.scale, options.scales),
        [],
        tidy({"part": part, **row} for part, own in rows.items() for row in own),
    )
    folder = result.write(io, {"edits": linearity_figure(kept)})
    write_samples(kept, folder / "samples.parquet")


def measure(io: StageIO, options: Options, seed: int) -> dict[str, list[Row]]:
    """Return the rows of one seed: `edits`, `experts`, `vectors`, `features`, `samples`.

    Args:
        io: the stage's files, where samples are kept.
        options: the study's choices.
        seed: of weights, rows and order.
    """
    if options.checkpoints is not None:
        done = open_checkpoints(options.checkpoints, io.root, options.texts)
    else:
        assert options.world is not None
        done = train_texts(options.world, seed)
    measured, edits, asked = measure_edits(done, options.scale, options.scales, seed=seed)
    found = examples_of(measured, asked, options.scale)
    write_samples(found, samples_file(io, seed))
    return {
        "edits": edits,
        "experts": expert_rows(done, seed),
        "vectors": vector_rows(done, io.scratch / f"vectors_{seed}", seed),
        "features": feature_rows(done, seed),
        "samples": sample_rows(found, samples_file(io, seed), seed),
    }


def expert_rows(done: TunedModels, seed: int) -> list[Row]:
    """Return how many answers each expert and the start get right, in %; nothing of texts without answers."""
    rows = []
    for task, test in done.tests.items():
        if not hasattr(test, "scores"):
            continue
        told: dict[str, float] = {}
        for name, state in (("start", done.start), ("expert", done.tuned[task])):
            done.model.load(state)
            told[name] = 100 * mean(accuracies(done.model, {task: test}))
        rows.append({"seed": seed, "tasks": task, **told})
    return rows
