"""mergekit's configurations as recipes."""
