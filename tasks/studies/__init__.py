"""The studies: one experiment of a paper a file. `runs.py` trains what they share, `results.py` keeps the findings."""
