"""Which extra of the package installs what: merging alone needs none of them."""

from importlib.util import find_spec

from mergeflow.errors import MergeflowError

EXTRAS = {
    "open_clip": "vision",
    "torchvision": "vision",
    "PIL": "vision",
    "pyarrow": "vision",
    "optuna": "search",
    "sklearn": "suite",
    "matplotlib": "suite",
    "transformers": "text",
    "tokenizers": "text",
    "rouge_score": "rouge",
    "peft": "lora",
    "datasets": "hub",
    "jinja2": "project",
    "prefect": "project",
    "mlflow": "project",
    "dvc": "project",
    "psycopg2": "postgres",
}
"""Module to the extra of pyproject.toml that installs it."""


def not_installed(module: str | None) -> MergeflowError | None:
    """Return the error for a module that an extra would install; None for any other.

    Example:
        >>> str(not_installed("optuna.samplers"))
        "this needs the package 'optuna', which is not installed: pip install '/path/to/mergeflow[search]'"
    """
    name = (module or "").partition(".")[0]
    if name not in EXTRAS:
        return None
    return MergeflowError(
        f"this needs the package '{name}', which is not installed: pip install '/path/to/mergeflow[{EXTRAS[name]}]'"
    )


def require(*modules: str) -> None:
    """Refuse to start what needs a module that is not installed; nothing is imported.

    Raises:
        MergeflowError: naming the first that is missing, and the extra that installs it.
    """
    for module in modules:
        if find_spec(module) is None:
            error = not_installed(module)
            assert error is not None, f"no extra installs {module}"
            raise error
