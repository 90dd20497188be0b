"""New versions out of registered ones: reproduce, unmerge, add a task. All three work in a scratch project."""
