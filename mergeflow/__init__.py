"""mergeflow: from one base and many tasks to experts, task vectors and merged models."""
