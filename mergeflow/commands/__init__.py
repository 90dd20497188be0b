"""The library's commands, one file for each family; heavy imports happen when a command runs."""

ANYWHERE = frozenset({"new", "linearity", "advise"})  # of the application's commands: they need no project
