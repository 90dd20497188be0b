"""Exact selection over a whole model: k-th largest magnitudes, and trimming to a share of them, as first passes."""
