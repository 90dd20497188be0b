"""Study `coloured_clip`: does the theory of λ hold for a CLIP that answers odd or even from prompts?

**Question.** The study coloured_digits asks it of a transformer that learnt digits and nothing else, and whose head is
fresh. Here Ψ^(0) is the embedded CLIP, whose head is made from prompts and stays as it is: fine-tuning moves the image
tower alone, as in the studies of merging. Do the same statements hold?

**Method.** As in coloured_digits, whose tasks, λ, lengths and rules these are. A logit is CLIP's scale times the cosine
of the picture with the mean of the five prompts "a photo of handwritten digit three" (and so on) of the odd or of the
even digits. All experts begin with the same weights, whatever the seed; seeds differ in the order of the examples.

**Source.** Li et al. 2025, Section 4.1, Tables 1 and 2, Figures 1 and 2, Equations 7 and 11.
"""

from studies.old.papers.coloured_digits.study import SYSTEMS, Options, run
from tasks.project.declaration import Declaration

__all__ = ["DECLARED", "run"]

DECLARED = Declaration(Options, systems=SYSTEMS)
