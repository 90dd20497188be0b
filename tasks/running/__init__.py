"""How stages run: digests of their code, the runner, progress, logs, devices, releases compared."""
