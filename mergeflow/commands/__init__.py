"""The library's commands, one file for each family; heavy imports happen when a command runs."""
