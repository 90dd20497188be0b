"""Commands of a project that need neither Prefect nor the registry."""
