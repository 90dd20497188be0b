"""The experts of a suite in one file, at a fraction of their size."""
