"""Search over the arguments of merge methods: grids, lines, Optuna, and the journal that makes them resumable."""
