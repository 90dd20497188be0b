"""Make the embedded base of sentences8 again: python -m suites.sentences.regenerate OUT

On the machine and library versions that made the shipped files the bytes are the same; elsewhere they differ by float
rounding, and so do the results of everything that starts from it.
"""

from suites.regeneration import Out, Steps, regenerate_base, run


def regenerate(out: Out, steps: Steps = None) -> None:
    """Write the sentences and train the base, about four minutes of processor time."""
    from suites.sentences.pretraining import PretrainSettings, pretrain

    regenerate_base(pretrain, PretrainSettings(), out, steps)


if __name__ == "__main__":
    run(regenerate)
