"""Adapters out: a merge's difference from its base as a PEFT folder, by exact factor algebra or truncated SVD."""
