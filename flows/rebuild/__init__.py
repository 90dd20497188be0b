"""New versions out of registered ones: reproduce, unmerge, unlearn, add a task. All work in a scratch project."""
