"""Per-task compression: every task's own model at a fraction of the storage, one family a file."""
