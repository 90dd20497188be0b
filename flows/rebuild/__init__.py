"""New versions out of registered ones: reproduce, unmerge, add a task. Their common ground is a scratch project."""
