"""Make the embedded base of the corpus books again: python -m suites.books.regenerate OUT

On the machine and library versions that made the shipped files the bytes are the same; elsewhere they differ by float
rounding, and so do the results of everything that starts from it.
"""

from suites.regeneration import Out, Steps, regenerate_base, run


def regenerate(out: Out, steps: Steps = None) -> None:
    """Write the texts and train the base, about three minutes of two cores."""
    from suites.books.pretraining import PretrainSettings, pretrain

    regenerate_base(pretrain, PretrainSettings(), out, steps)


if __name__ == "__main__":
    run(regenerate)
