"""The section `score` of a sweep file: how candidates are scored that are not image encoders."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from mergeflow.errors import MergeflowError
from mergeflow.schema import Frozen, faults_of


class FunctionScore(Frozen):
    """A function of yours: `function(model, candidate)` returns a score per task.

    Attributes:
        function: `module:function`, or `path/to/file.py:function`.
        model: What the function is given: a `state` dict in memory, or the path of a model `folder`.
    """

    function: str = Field(pattern=r"^.+:\w+$")
    model: Literal["state", "folder"] = "state"


class CommandScore(Frozen):
    """A command that prints a JSON object of scores by task.

    Attributes:
        command: With {model} for the folder of the merged model, and {split} for the split.
        timeout: Seconds after which it is stopped; without one it may take as long as it likes.
    """

    command: str
    timeout: float | None = Field(default=None, gt=0)

    @field_validator("command")
    @classmethod
    def _names_the_model(cls, command: str) -> str:
        if "{model}" not in command:
            raise MergeflowError("the command needs {model} where it takes the folder of the merged model")
        return command


class LmEvalScore(Frozen):
    """Tasks of lm-evaluation-harness (the extra `lm-eval`), by name.

    Attributes:
        lm_eval: Names of tasks.
        metric: Of each task; its first one by default. Where less is better, the score is the negative.
        include: A folder with tasks of your own in the harness's format.
        few_shot: Examples in the prompt; the task's own number by default.
        limit: Documents per task at most.
        batch_size: Documents per forward pass.
    """

    lm_eval: list[str] = Field(min_length=1)
    metric: str | None = None
    include: str | None = None
    few_shot: int | None = Field(default=None, ge=0)
    limit: int | None = Field(default=None, ge=1)
    batch_size: int = Field(8, ge=1)


ScorePart = FunctionScore | CommandScore | LmEvalScore
_KINDS: dict[str, type[ScorePart]] = {"function": FunctionScore, "command": CommandScore, "lm_eval": LmEvalScore}


def read_score(value: Any) -> Any:
    """Return the section `score` as a record.

    Raises:
        MergeflowError: It names no scorer or several, or a key or value of it is wrong.
    """
    if value is None or isinstance(value, ScorePart):
        return value
    if isinstance(value, str):
        value = {"function": value}
    if not isinstance(value, dict):
        raise MergeflowError(f"must be `module:function`, or one of {', '.join(_KINDS)}, found {value!r:.80}")
    named = [key for key in _KINDS if key in value]
    if len(named) != 1:
        raise MergeflowError(f"must name one of {', '.join(_KINDS)}, found {', '.join(map(str, value)) or 'nothing'}")
    kind = _KINDS[named[0]]
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise MergeflowError("\n".join(faults_of(error, kind))) from None


def name_of(part: ScorePart) -> str:
    """Return what messages call a scorer."""
    if isinstance(part, FunctionScore):
        return f"score function '{part.function}'"
    if isinstance(part, CommandScore):
        return f"score command '{Path(part.command.split()[0]).name}'"
    return "lm-evaluation-harness"
