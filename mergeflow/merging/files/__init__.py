"""Merging between files: recipes, their plan, the streaming merge, and what it leaves on disk."""
