"""How the experts that a study reads were tuned."""

from mergeflow import layout
from studies.lab.inputs import TrainingRun

PUBLISHED = "published"
"""Said in the place of a regime: only those who tuned these experts know how."""


def regime_of(run: TrainingRun, seed: int) -> str:
    """Return the `finetune.regime` of a run's experts, or `PUBLISHED` of checkpoints that were taken without training.

    Args:
        run: one that has experts, not one joint model.
        seed: of the run.
    """
    folder = run.io.dep(layout.study_run(run.name)) / f"seed_{seed}" / "experts" / run.tasks[0]
    if not (folder / "training.json").exists():
        return PUBLISHED
    regime: str = run.settings(seed)["regime"]
    return regime
