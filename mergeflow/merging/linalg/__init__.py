"""Linear algebra of the methods."""
