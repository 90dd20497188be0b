"""Sweep files: what is merged, scored on what, and which arguments are tried; validated before a weight is read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, ValidationError, field_validator, model_validator

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.merging import Recipe, get, make_recipe
from mergeflow.merging.files.fields import Paths, Patterns
from mergeflow.merging.files.recipe import with_tokenizer
from mergeflow.merging.vocabulary.companions import TokenizerChoice, tokenizer_choice
from mergeflow.modalities.catalog import is_recorded
from mergeflow.schema import Frozen, Seed, faults_of, validated
from mergeflow.search.candidates import Space, check_space, grid_of, values_of
from mergeflow.training.settings import Precision
from mergeflow.yaml_text import read_yaml


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
    """Return the section `score` as a record."""
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
    """Return the name of a scorer in messages."""
    if isinstance(part, FunctionScore):
        return f"score function '{part.function}'"
    if isinstance(part, CommandScore):
        return f"score command '{Path(part.command.split()[0]).name}'"
    return "lm-evaluation-harness"


class ModelPart(Frozen):
    """The image encoder.

    Attributes:
        architecture: An open_clip architecture, or pocket-clip.
        pretrained: An open_clip tag or local file with the whole CLIP; needed for heads that are built here.
        image_size: Side of the images in pixels; the architecture's own by default.
    """

    architecture: str
    pretrained: str | None = None
    image_size: int | None = Field(default=None, ge=1)

    @field_validator("architecture")
    @classmethod
    def _name(cls, value: str) -> str:
        if is_recorded(value):
            raise ValueError(
                f"expected a name of open_clip, since a sweep file's tasks are of images; found '{value}'. Encoders of "
                "texts are scored by the project's own `sweep` in params.yaml, or by a `score` of yours here"
            )
        return value


class SourceError(MergeflowError):
    """A task's source that cannot be prepared."""


class TaskPart(Frozen):
    """A task that candidates are scored on.

    Attributes:
        data: A prepared folder, or
        source: an address that is prepared into the sweep's folder: suite:NAME, folder:PATH, parquet:PATH, ...
        head: The file of its zero-shot head; built from the class names by default.
        expert: Which expert learned it; the one of the task's name by default.
    """

    data: str | None = None
    source: str | None = None
    head: str | None = None
    expert: str | None = None

    @model_validator(mode="after")
    def _one_origin(self) -> "TaskPart":
        if (self.data is None) == (self.source is None):
            raise ValueError("give either `data` (a prepared folder) or `source` (an address: suite:pocket8/digits)")
        return self


class SearchPart(Frozen):
    """A search with Optuna instead of a grid: trials for each method; the sampler's seed is the sweep's by default."""

    trials: int = Field(ge=1)
    sampler: Literal["tpe", "random", "gp"] = "tpe"
    seed: Seed | None = None


def _validation_only(value: Any) -> Any:
    if value == "test":
        raise ValueError("hyper-parameters are never chosen on test: use `split: validation`, and look at test once")
    return value


class Sweep(Frozen):
    """A sweep, as a frozen record.

    Attributes:
        model: The architecture that image encoders share.
        tasks: Images that candidates are scored on, by name.
        score: Who scores models of any other kind; it replaces `model` and `tasks`.
        methods: Method → argument → values (a grid), or ranges and choices (with `search`).
        search: Search with Optuna instead of the grid.
        objective: `normalised`: mean over tasks of merged / expert accuracy, the default for images; or `mean`.
        test: Look at the winner's score on test, once.
        seed: Of prepared sources and of the search.
        batch_size: Images per forward pass.
        precision: Of the forward passes on images; a scorer of yours has its own.
        compile: Whether these go through torch.compile.
        data: Statistics of data that a method needs: kind → expert → path.
        tokenizer: Whose tokens all candidates have, as in a recipe; `tokenizer_source: X` is its `source`.
        chat_template: Whose chat template they have, as in a recipe.
        allow: Patterns of differences between models that are accepted, as in a recipe.
    """

    base: str
    experts: Paths
    model: ModelPart | None = None
    tasks: dict[str, TaskPart] = Field(default={})
    score: Annotated[ScorePart | None, PlainValidator(read_score)] = None
    methods: dict[str, Space] = Field(min_length=1)
    search: SearchPart | None = None
    objective: Literal["normalised", "mean"] = "normalised"
    split: Annotated[Literal["validation"], BeforeValidator(_validation_only)] = "validation"
    test: bool = False
    seed: Seed = 0
    batch_size: int = Field(256, ge=1)
    precision: Precision = "float32"
    compile: bool = False
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    data: dict[str, Paths] = Field(default={})
    tokenizer: Annotated[TokenizerChoice | None, BeforeValidator(tokenizer_choice)] = None
    chat_template: str | None = None
    allow: Patterns | None = None

    @field_validator("tasks", mode="before")
    @classmethod
    def _short_tasks(cls, value: Any) -> Any:
        """Read a task that is given only as the path of its prepared folder."""
        if not isinstance(value, Mapping):
            return value
        return {str(name): {"data": task} if isinstance(task, str) else task for name, task in value.items()}

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        if values.get("score") is not None:  # scores of a user's may have any size
            values = {"objective": "mean", **values}
        return with_tokenizer(values, "sweep")

    @model_validator(mode="after")
    def _check(self) -> "Sweep":
        _check_scorer(self)
        _check_tasks(self)
        for method, space in self.methods.items():
            for args in check_space(method, space, self.search is not None):
                self.recipe(method, args)
        return self

    def recipe(self, method: str, args: Mapping[str, Any], out: str | None = None) -> Recipe:
        """Return one candidate as a recipe, with the statistics that its method reads; without `out` to be scored."""
        kinds = [datum.name for datum in get(method).given]
        data = {kind: dict(paths) for kind, paths in self.data.items() if kind in kinds}
        values = {"method": method, "args": dict(args), "data": data, "device": self.device, "out": out}
        return make_recipe({**self.inputs(), **values}, f"method '{method}'")

    def inputs(self) -> dict[str, Any]:
        """Return the part that the recipes of all candidates share: models, and how they are brought together."""
        return {
            "base": self.base,
            "experts": dict(self.experts),
            "tokenizer": self.tokenizer.model_dump(mode="json", exclude_none=True) if self.tokenizer else None,
            "chat_template": self.chat_template,
            "allow": self.allow,
        }

    def grid(self) -> list[tuple[str, dict[str, Any]]]:
        """Return every candidate of the grid, those that share a direction after each other, each once."""
        assert self.search is None
        return [(method, args) for method, space in self.methods.items() for args in grid_of(method, values_of(space))]

    def expert_of(self, task: str) -> str | None:
        """Return the expert that learned a task, if there is one."""
        part = self.tasks.get(task)
        name = task if part is None or part.expert is None else part.expert
        return name if name in dict(self.experts) else None


def _check_scorer(sweep: Sweep) -> None:
    if sweep.score is None:
        if sweep.tokenizer or sweep.chat_template:
            raise ValueError("`tokenizer` and `chat_template` are of language models: give a scorer (`score:`)")
        missing = [key for key in ("model", "tasks") if not getattr(sweep, key)]
        if missing:
            raise ValueError(f"{' and '.join(missing)} missing: name the images to score on, or a scorer (`score:`)")
    elif sweep.model is not None or sweep.tasks:
        raise ValueError("`score` replaces `model` and `tasks`: keep the scorer, or the images")
    elif sweep.test and isinstance(sweep.score, CommandScore) and "{split}" not in sweep.score.command:
        raise ValueError("`test: true` needs {split} in score.command, which says validation or test")


def _check_tasks(sweep: Sweep) -> None:
    experts = dict(sweep.experts)
    for name, task in sweep.tasks.items():
        if "/" in name or name.startswith("."):
            raise ValueError(f"task name '{name}' must not hold '/' or start with '.'")
        if task.expert is not None and task.expert not in experts:
            raise unknown_name(f"expert of task '{name}'", task.expert, experts)
        if sweep.objective == "normalised" and sweep.expert_of(name) is None:
            raise ValueError(
                f"task '{name}' has no expert to be normalised by: name one (`expert:`), or use `objective: mean`"
            )
        assert sweep.model is not None
        if task.head is None and sweep.model.pretrained is None:
            raise ValueError(f"task '{name}' has no head: give its file (`head:`), or `model.pretrained` to build it")


def load_sweep(path: str | Path) -> Sweep:
    """Read and validate a sweep file; errors are those of `load_recipe`. Paths start at the current folder."""
    place = Path(path)
    values = read_yaml(place, "sweep")
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise MergeflowError(f"sweep '{place}' holds a {kind}, expected keys such as base, experts and methods.")
    return make_sweep(values, str(place))


def make_sweep(values: Mapping[str, Any], origin: str = "sweep") -> Sweep:
    """Validate a mapping as a sweep."""
    return validated(Sweep, dict(values), origin)
