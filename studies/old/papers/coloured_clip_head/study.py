"""Study `coloured_clip_head`: does the theory of λ hold for a CLIP whose head is tuned as well?

**Question.** In the study coloured_clip the head of every expert is the same and frozen. Here it begins with the same
prompts and is tuned beside the image tower, so that task vectors hold a change of the head too. Do the same statements
hold?

**Method.** As in coloured_digits, whose tasks, λ, lengths and rules these are, and as in coloured_clip, whose CLIP and
prompts these are.

**Source.** Li et al. 2025, Section 4.1, Tables 1 and 2, Figures 1 and 2, Equations 7 and 11.
"""

from studies.old.papers.coloured_digits.study import SYSTEMS, Options, run
from tasks.project.declaration import Declaration

__all__ = ["DECLARED", "run"]

DECLARED = Declaration(Options, systems=SYSTEMS)
