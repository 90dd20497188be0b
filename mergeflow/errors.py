"""The error that people see, and messages that several places share, such as which extra installs a package."""

import errno
import os
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib.util import find_spec


class MergeflowError(ValueError):
    """Bad input. The message names the thing, what was found, what was expected and the way out.

    The command line prints the message alone, without a traceback, and exits with status 2. Messages quote other
    programs' and end up in logs, so passwords in addresses are masked here, where all of them pass.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_passwords(argument) if isinstance(argument, str) else argument for argument in args))


SECRETS = (
    *("PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_KEY"),
    *("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "MERGEFLOW_SERVE_TOKEN"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "PGPASSWORD"),
)  # variables of the environment that hold one
_SHORTEST = 4  # characters of a secret that is looked for: less is found in any text


def without_passwords(text: str) -> str:
    """Return a text in which stars stand for the passwords of addresses and for the environment's secrets.

    Example:
        >>> without_passwords("no answer from https://bob:s3cret@host/api, postgresql://host/db?user=bob&password=x")
        'no answer from https://bob:***@host/api, postgresql://host/db?user=bob&password=***'
        >>> without_passwords("http://host:5000/#/models/merged@champion")
        'http://host:5000/#/models/merged@champion'
    """
    text = re.sub(r"(://[^\s/:@]*:)(?!\d{1,5}/)[^\s'\"]*@", r"\1***@", text)
    text = re.sub(r"(?i)((?<![a-z])\w*(?:password|secret|token|secret_access_key)=)[^\s&'\"]+", r"\1***", text)
    for name in SECRETS:
        value = os.environ.get(name, "")
        secret = value.partition(":")[2] if name.endswith("AUTH_STRING") else value
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, "***")
    return text


def hide_passwords(error: BaseException | None) -> None:
    """Put stars for the secrets in the texts of an error and of those that it came from, which others will log."""
    while error is not None:
        error.args = tuple(without_passwords(text) if isinstance(text, str) else text for text in error.args)
        error = error.__cause__ or error.__context__


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it was made of, says that the disk has no space or the user no quota left."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(words in str(error) for words in ("database or disk is full", "No space left on device")):  # SQLite's
            return True
        error = error.__cause__ or error.__context__
    return False


def not_permitted(error: BaseException) -> MergeflowError | None:
    """Return the error for a file or folder that this user may not use as the command has to; None for any other."""
    if not isinstance(error, OSError) or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return None
    return MergeflowError(
        f"{error.filename or 'a file'}: {(error.strerror or '').lower()}. Let this user read and write it "
        "(`ls -ld` tells whose it is)."
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without the full stop; its type where there is none."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


_MOST_LISTED = 60  # names; of more, such as open_clip's architectures, an error names the nearest


def unknown_name(kind: str, name: str, options: Iterable[str]) -> MergeflowError:
    """Return the error for a name that is not among `options`, with the nearest right one.

    Example:
        >>> str(unknown_name("method", "tsi", ["ties", "cart"]))
        "unknown method 'tsi': did you mean 'ties'? Known: cart, ties."
        >>> str(unknown_name("method", "TSV", ["ties", "tsv"]))
        "unknown method 'TSV': did you mean 'tsv'? Known: ties, tsv."
    """
    names = sorted(options)
    alike = [option for option in names if option.casefold() == name.casefold()]
    nearest = alike or get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean '{nearest[0]}'? " if nearest else ""
    if len(names) > _MOST_LISTED:
        like = ", ".join(get_close_matches(name, names, n=10, cutoff=0.0))
        return MergeflowError(f"unknown {kind} '{name}': {hint}{len(names)} names exist, most alike: {like}.")
    return MergeflowError(f"unknown {kind} '{name}': {hint}Known: {', '.join(names) or 'none'}.")


def together(*checks: Callable[[], object]) -> None:
    """Run all checks, and raise the faults of all of them in one error."""
    faults = []
    for check in checks:
        try:
            check()
        except MergeflowError as error:
            faults.append(str(error))
    if faults:
        raise MergeflowError("\n".join(dict.fromkeys(faults)))


def check_model_name(name: str) -> None:
    """Refuse a registered model's name that would not survive an address such as models:/NAME@champion.

    Example:
        >>> check_model_name("mergeflow-pocket8")
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise MergeflowError(
            f"the model name {name!r} cannot be used in an address like models:/NAME@champion: "
            "use letters, digits, dots, dashes and underscores."
        )


def check_name(what: str, name: str) -> None:
    """Refuse a name of a task or project that is not fit for paths, for DVC's addresses and for a registered model.

    Example:
        >>> check_name("task", "digits-2")
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise MergeflowError(f"'{name}' cannot name a {what}: use a to z, digits, '-' and '_'.")


# Which extra of the package installs what: merging alone needs none of them.


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
    """Refuse to start what needs a module that is not installed; nothing is imported."""
    for module in modules:
        if find_spec(module) is None:
            error = not_installed(module)
            assert error is not None, f"no extra installs {module}"
            raise error
