"""Benchmarks of merging: `python -m benchmarks.merging --help`."""
