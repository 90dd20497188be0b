"""What a study reads: the base, the training runs, and how good a model is on validation and on test."""

import json
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from mergeflow import layout
from mergeflow.checkpoints import fingerprint, read_state
from mergeflow.checkpoints.writer import write_atomically
from mergeflow.errors import MergeflowError
from mergeflow.evaluation.accuracy import Judge
from mergeflow.evaluation.averages import mean
from mergeflow.evaluation.scoring import CandidateScorer
from mergeflow.modalities.heads import Head
from mergeflow.modality import Examples, Model
from mergeflow.plugins import PRIVATE
from mergeflow.processes import worker_pool
from mergeflow.search.candidates import best_on_line, line, score_all
from studies.lab.rows import Row, accuracy_rows
from tasks.models import choose_device, load_base_head, load_examples, load_model
from tasks.project.stage import CHOICES, STUDIES, StageIO
from tasks.running.devices import device_names
from tasks.training import head_file

# Pieces of measuring are cached until the study is complete, so that a killed study continues


Opened = TypeVar("Opened")
Measured = TypeVar("Measured")
Piece = dict[str, Any]
"""JSON values of one piece of measuring."""


class Lazy(Generic[Opened]):
    """A value that is made at its first use, and is then pickled to other processes.

    Example:
        >>> words = Lazy(lambda: print("made") or ["a", "b"])
        >>> words(), words()
        made
        (['a', 'b'], ['a', 'b'])
    """

    def __init__(self, make: Callable[[], Opened]) -> None:
        self._make = cache(make)
        # As bytes: torch would put tensors into shared memory, of which a container has little. Every piece has them.
        self._packed = cache(lambda: pickle.dumps(self()))

    def __call__(self) -> Opened:
        return self._make()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self._packed(),)


def _unpacked(made: bytes) -> Lazy[Any]:
    return Lazy(partial(pickle.loads, made))


def cached(io: StageIO, name: str, measure: Callable[[], Piece]) -> Piece:
    """Return `measure()`, or what it returned before a kill.

    Args:
        name: of the piece, unique within the stage.
    """
    path = _piece(io, name)
    if not path.exists():
        write_atomically(path, json.dumps(measure()))
    row: Piece = json.loads(path.read_text())
    return row


def cached_all(io: StageIO, measures: Mapping[str, Callable[[], Piece]], what: str = "pieces") -> list[Piece]:
    """Measure or read every piece as `cached` does; missing ones are measured by `run.workers` processes.

    On a device, which is held for one of them, and where the code lies in the project's own folder, which no other
    process can import by name, pieces are measured in turn.

    Args:
        measures: by the piece's name, what measures it; a process gets it pickled. No result depends on the others.
        what: what progress counts.
    """
    missing = [name for name in measures if not _piece(io, name).exists()]
    workers = min(io.params.run.workers, len(missing)) if device_names(io.params.run.device) == ["cpu"] else 1
    if workers > 1 and not any(PRIVATE.encode() in pickle.dumps(measures[name]) for name in missing):
        with worker_pool(workers) as pool:
            names = {pool.submit(measures[name]): name for name in missing}
            for future in as_completed(names):
                write_atomically(_piece(io, names.pop(future)), json.dumps(future.result()))
                io.report(what, len(measures) - len(names), len(measures))
    measured = []
    for done, (name, measure) in enumerate(measures.items()):
        io.report(what, done, len(measures))
        measured.append(cached(io, name, measure))
    return measured


def _piece(io: StageIO, name: str) -> Path:
    return io.scratch / "pieces" / f"{name}.json"


# What a study reads


State = dict[str, Tensor]
Heads = Mapping[str, dict[str, Tensor]]
"""By task the weights of its head."""
MODEL_NAME = layout.MODEL_FILE.removesuffix(".safetensors")
Accuracy = dict[str, float]


class Judged(float):
    """A task's accuracy, the mean of its examples' scores in [0, 1], which it brings along; arithmetic drops them."""

    scores: np.ndarray

    @classmethod
    def of(cls, scores: np.ndarray) -> Self:
        """Make it of the scores [N] of a test split."""
        judged = cls(scores.mean(dtype=np.float64))
        judged.scores = scores
        return judged


@dataclass(frozen=True)
class TrainingRun:
    """One run of studies/params.yaml, as the stage `train` left it."""

    io: StageIO
    name: str
    tasks: Sequence[str]

    @property
    def folder(self) -> Path:
        """Where the run's files are."""
        return self.io.dep(layout.study_run(self.name))

    @property
    def seeds(self) -> list[int]:
        """The seeds of this run, which may be fewer than the project's."""
        return sorted(int(path.name.removeprefix("seed_")) for path in self.folder.glob("seed_*"))

    @property
    def tuned(self) -> list[str]:
        """The tasks of interest that this run has an expert of."""
        return [task for task in self.tasks if (self.folder / f"seed_{self.seeds[0]}/experts/{task}").exists()]

    def expert(self, seed: int, task: str) -> State:
        """Return θ_t; of an iterative run that of the last round."""
        return self._state(f"seed_{seed}/experts/{task}/{MODEL_NAME}")

    def experts(self, seed: int) -> dict[str, State]:
        return {task: self.expert(seed, task) for task in self.tasks}

    def heads(self, seed: int) -> Heads:
        """Return the heads that came out of the training of the experts or of the joint model, where there are any."""
        folder = self.folder / f"seed_{seed}"
        files = {task: folder / "experts" / task / layout.HEAD_FILE for task in self.tasks}
        if self.is_joint(seed):
            files = {task: head_file(folder / "model", self.tasks, task) for task in self.tasks}
        return {task: read_state(file) for task, file in files.items() if file.exists()}

    def is_joint(self, seed: int) -> bool:
        """Return whether the run made one model for all tasks."""
        return (self.folder / f"seed_{seed}/model").exists()

    def epoch(self, seed: int, task: str, number: int) -> State:
        """Return θ_t after an epoch of a run with `keep_epochs`.

        Args:
            number: of the epoch, from 1.
        """
        return self._state(f"seed_{seed}/experts/{task}/epochs/epoch_{number:03}")

    def training(self, seed: int, task: str) -> dict[str, Any]:
        """Return an expert's training.json; `epochs` are its rows."""
        return self._json(f"seed_{seed}/experts/{task}/training.json")

    def settings(self, seed: int) -> dict[str, Any]:
        """Return the settings of `finetune` that the run was trained with."""
        model = "model" if self.is_joint(seed) else f"experts/{self.tasks[0]}"
        settings: dict[str, Any] = self._json(f"seed_{seed}/{model}/training.json")["settings"]
        return settings

    def model(self, seed: int) -> State:
        """Return the model of a joint run."""
        return self._state(f"seed_{seed}/model/{MODEL_NAME}")

    def rounds(self, seed: int) -> list[dict[str, Any]]:
        """Return the rows of an iterative run: round, steps, tasks, cosine_tau, cosine_delta, expert_validation."""
        rows: list[dict[str, Any]] = self._json(f"seed_{seed}/rounds.json")
        return rows

    def merged(self, seed: int, number: int) -> State:
        """Return θ̄(i), the merge after round `number`, of an iterative run."""
        return self._state(f"seed_{seed}/merged/round_{number:03}")

    def final(self, seed: int) -> State:
        """Return the one model that a joint or an iterative run ends with."""
        return self.model(seed) if self.is_joint(seed) else self.merged(seed, len(self.rounds(seed)))

    def start(self, seed: int) -> State:
        """Return θ̄(N−1), from which the last round of an iterative run started."""
        return self._state(f"seed_{seed}/start")

    def cost(self, seed: int) -> dict[str, Any]:
        """Return one seed's `mergeflow.training.Cost` as JSON, and of an iterative run `rounds`: processor seconds."""
        record, seed_name = self.io.cost(f"{STUDIES}:train@{self.name}"), f"seed_{seed}"
        return {**record["training"][seed_name], "rounds": record.get("rounds", {}).get(seed_name, [])}

    def _state(self, name: str) -> State:
        return read_state(self.io.dep(f"{layout.study_run(self.name)}/{name}.safetensors"))

    def _json(self, name: str) -> Any:
        return json.loads(self.io.dep(f"{layout.study_run(self.name)}/{name}").read_text())


class Laboratory:
    """The inputs of one study; examples are opened once, weights are swapped in place and judged once."""

    def __init__(self, io: StageIO) -> None:
        self.io = io
        self.heads: Heads = {}
        self._examples: dict[tuple[str, str], Examples] = {}
        self._judged: dict[tuple[str, str, str], float] = {}  # fingerprint, split, task → accuracy
        self._judges: dict[int, Judge] = {}  # of a model by its id; copies share them

    @cached_property
    def tasks(self) -> list[str]:
        return list(self.io.section("tasks"))

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds of studies/params.yaml."""
        return list(self.io.section(f"{CHOICES}:seeds"))

    @cached_property
    def device(self) -> torch.device:
        """The device that models are on, held until the study ends."""
        return choose_device(self.io)

    def changed(self, **parts: Any) -> "Laboratory":
        """Return the same with some parts changed; what the others have opened is shared."""
        assert self.model  # made before the copy, so that both have the same
        laboratory = type(self).__new__(type(self))
        vars(laboratory).update(vars(self) | parts)
        return laboratory

    def __getstate__(self) -> dict[str, Any]:
        """Go to another process without what was opened here, which opens there when it is asked for."""
        opened = {key: value for key, value in vars(self).items() if key in ("io", "tasks", "seeds", "device", "heads")}
        return {**opened, "_examples": {}, "_judged": {}, "_judges": {}}

    def cached(self, measures: Mapping[str, Callable[[], Iterable[Row]]], what: str = "pieces") -> list[Row]:
        """Return the rows of every piece; each is kept until the study is complete, so that a killed one goes on there.

        On the processor pieces are measured by `run.workers` processes, on a device one after the other.

        Args:
            measures: by the piece's name, what yields its rows. Another process gets it pickled, so it is a function of
                the study's module or a `partial` of one; no piece depends on the others.
            what: what progress counts.
        """
        pieces = {name: partial(_listed, measure) for name, measure in measures.items()}
        return [row for piece in cached_all(self.io, pieces, what) for row in piece["rows"]]

    def keep(self, name: str, measure: Callable[[], Iterable[Row]]) -> list[Row]:
        """Return the rows of `measure()`, a part of a piece, kept under `name` as a piece is."""
        return list(cached(self.io, name, partial(_listed, measure))["rows"])

    def by_seed(
        self, measure: Callable[[int], Iterable[Row]], seeds: Sequence[int] | None = None, name: str = "seed"
    ) -> list[Row]:
        """Return the rows of `measure(seed)` for every seed, each kept as the piece `NAME_SEED`."""
        chosen = self.seeds if seeds is None else seeds
        return self.cached({f"{name}_{seed}": partial(measure, seed) for seed in chosen}, name)

    def of_run(
        self, run: str, seed: int, measure: "Callable[[Laboratory, str, int], Measured]"
    ) -> "Callable[[], Measured]":
        """Return a piece of `cached` or `keep`: `measure(lab, run, seed)`.

        That laboratory is this one, with the heads that the run left where tasks have heads of their own.
        """
        return partial(_of_run, self, measure, run, seed)

    def by_run(
        self,
        names: Iterable[str],
        measure: "Callable[[Laboratory, str, int], Iterable[Row]]",
        seeds: Sequence[int] | None = None,
        name: str = "",
    ) -> list[Row]:
        """Return the rows of `measure(lab, run, seed)` for every seed of every training run, each a piece of `of_run`.

        Args:
            seeds: those that count, by default all that a run has.
            name: put before that of every piece, where runs are measured in several ways.
        """
        asked = [(run, seed) for run in names for seed in (self.run(run).seeds if seeds is None else seeds)]
        pieces = {f"{name}{run}_{seed}": self.of_run(run, seed, measure) for run, seed in asked}
        return self.cached(pieces, "runs and seeds")

    def first(self, count: int) -> "Laboratory":
        """Return the same for the first `count` tasks alone; examples and model are shared."""
        if not 1 <= count <= len(self.tasks):
            raise MergeflowError(
                f"a study asks for the first {count} tasks, but there are {len(self.tasks)}: {', '.join(self.tasks)}. "
                "Ask for fewer in studies/params.yaml, or add tasks."
            )
        return self.only(self.tasks[:count])

    def only(self, tasks: Sequence[str]) -> "Laboratory":
        """Return the same for some of the tasks alone; examples and model are shared."""
        return self.changed(tasks=[task for task in self.tasks if task in tasks])

    def blind(self) -> "Laboratory":
        """Return the same for choosing something: opening a test split is an error, even one that is open already.

        Example:
            >>> inputs.blind().accuracy(merged, "test")  # doctest: +SKIP
            Traceback (most recent call last):
            mergeflow.errors.MergeflowError: ... reads outputs/data/test/digits where it must not: ...
        """
        io = replace(self.io, withheld=(*self.io.withheld, f"{layout.DATA}/test"))
        return self.changed(io=io, _examples={key: part for key, part in self._examples.items() if key[0] != "test"})

    def with_heads(self, heads: Heads) -> "Laboratory":
        """Return the same with these heads, for tasks whose heads are trained with the model."""
        return self.changed(heads=heads, _examples={}, _judged={})

    @cached_property
    def trained_heads(self) -> bool:
        """Whether a task's head is trained with the model, so that every expert has its own."""
        heads = (load_base_head(self.io, task, torch.device("cpu")) for task in self.tasks)
        return any(head is not None and head.trained for head in heads)

    @cached_property
    def base(self) -> State:
        """The base θ0."""
        return read_state(self.io.dep(layout.BASE_MODEL))

    def run(self, name: str) -> TrainingRun:
        return TrainingRun(self.io, name, self.tasks)

    def examples(self, split: str) -> dict[str, Examples]:
        """Return every task's examples of a split."""
        for task in self.tasks:
            if (split, task) not in self._examples:
                head = self._head(task)
                self._examples[split, task] = load_examples(self.io, split, task, self.device, head)
        return {task: self._examples[split, task] for task in self.tasks}

    def _head(self, task: str) -> Head | None:
        head = load_base_head(self.io, task, self.device)
        if head is not None and head.trained:
            if task not in self.heads:
                raise MergeflowError(
                    f"this study judges models with the base's heads, and the head of task '{task}' is trained beside "
                    "the model: every expert has its own. A study of such tasks says whose heads read its models: it "
                    "measures by lab.by_run, or in a piece lab.of_run(RUN, seed, measure)."
                )
            head.load_state_dict(self.heads[task])
        return head

    def scorer(self, experts: Mapping[str, State]) -> CandidateScorer:
        """Make the scorer that merges these experts and judges them on validation, one of the study's `splits`."""
        judging = dict(self.io.section("evaluation"))
        return CandidateScorer(self.model, self.examples("validation"), self.base, experts, **judging)

    def accuracy(self, state: State, split: str, tasks: Sequence[str] | None = None) -> Accuracy:
        """Return the accuracy of a model on each task, on test `Judged`, in [0, 1]; the same weights are judged once.

        Args:
            split: train, validation or test.
            tasks: names of the tasks to look at; all of the study by default.
        """
        opened, digest = self.examples(split), fingerprint(state)
        keys = {task: (digest, split, task) for task in tasks or self.tasks}
        new = {task: opened[task] for task, key in keys.items() if key not in self._judged}
        if new:
            self.model.load(state)
            judged = {task: Judged.of(self._judge.scores(examples)) for task, examples in new.items()}
            self._judged |= {keys[task]: value if split == "test" else float(value) for task, value in judged.items()}
        return {task: self._judged[key] for task, key in keys.items()}

    def accuracy_rows(self, state: State, split: str, /, **settings: Any) -> list[Row]:
        """Return one row for each task: the settings, and the accuracy of a model in %."""
        return accuracy_rows(self.accuracy(state, split), **settings)

    def losses(self, state: Mapping[str, Tensor], examples: Mapping[str, Examples]) -> dict[str, float]:
        """Return the loss of a model on some examples of each task."""
        self.model.load(state)
        return self._judge.losses(examples)

    def individual(self, experts: Mapping[str, State], split: str) -> Accuracy:
        """Return every expert's accuracy on its own task."""
        return {task: self.accuracy(state, split, [task])[task] for task, state in experts.items()}

    @property
    def _judge(self) -> Judge:
        if id(self.model) not in self._judges:
            self._judges[id(self.model)] = Judge(self.model, **dict(self.io.section("evaluation")))
        return self._judges[id(self.model)]

    @cached_property
    def model(self) -> Model:
        return load_model(self.io, layout.BASE_MODEL, self.device)


def _of_run(lab: Laboratory, measure: Callable[[Laboratory, str, int], Measured], run: str, seed: int) -> Measured:
    heads = lab.run(run).heads(seed) if lab.trained_heads else {}
    return measure(lab.with_heads(heads) if heads else lab, run, seed)


def _listed(measure: Callable[[], Iterable[Row]]) -> dict[str, list[Row]]:
    return {"rows": list(measure())}


def over_seeds(
    open_world: Callable[[Any, Path], Opened], measure: Callable[[Any, Lazy[Opened], int], Iterable[Row]]
) -> Callable[[Laboratory, Any], list[Row]]:
    """Return a study's measurement: the rows of `measure(options, world, seed)` for every seed, each kept as a piece.

    Args:
        open_world: opens `options.world` below the project folder, once and where a piece is missing.
    """
    return lambda lab, options: lab.by_seed(
        partial(measure, options, Lazy(partial(open_world, options.world, lab.io.root))), options.seeds
    )


def mean_accuracy(accuracy: Accuracy) -> float:
    """Return the mean over tasks, in %."""
    return 100 * mean(accuracy)


@dataclass(frozen=True)
class ChosenScale:
    """The scale chosen on validation.

    Attributes:
        args: the method's arguments with the scale.
    """

    args: dict[str, Any]
    validation: Accuracy
    test: Accuracy
    tried: int


def choose_scale(
    inputs: Laboratory,
    scorer: CandidateScorer,
    method: str,
    scales: Sequence[float],
    start: float,
    args: Mapping[str, Any] | None = None,
    test: bool = True,
) -> ChosenScale:
    """Choose a method's scale on validation, walking the grid from `start` both ways; look at test once.

    Args:
        scorer: what merges and scores; of `inputs.blind()` where nothing else needs it.
        start: where to begin; the nearest scale is taken.
    """
    candidates = list(score_all(method, line("scale", scales, start, args), scorer.candidate, mean))
    best = best_on_line(candidates, "scale")
    accuracy = inputs.accuracy(scorer.merge(best.call), "test") if test else {}
    return ChosenScale(best.varied, best.scores, accuracy, len(candidates))


def grid(low: float, high: float, step: float) -> list[float]:
    """Return low, low + step, … high.

    Example:
        >>> grid(0.8, 1.0, 0.05)
        [0.8, 0.85, 0.9, 0.95, 1.0]
    """
    return [round(low + step * index, 10) for index in range(round((high - low) / step) + 1)]


PUBLISHED = "published"
"""Said in the place of a regime: only those who tuned these experts know how."""


def regime_of(run: TrainingRun, seed: int) -> str:
    """Return the `finetune.regime` of a run's experts, or `PUBLISHED` of checkpoints that were taken without training.

    Args:
        run: one that has experts, not one joint model.
    """
    if not (run.folder / f"seed_{seed}/experts/{run.tasks[0]}/training.json").exists():
        return PUBLISHED
    regime: str = run.settings(seed)["regime"]
    return regime
