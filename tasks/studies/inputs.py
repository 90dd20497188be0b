"""What a study reads: the base, the training runs, and how good a model is on validation and on test."""

import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from mergeflow import layout
from mergeflow.checkpoints import fingerprint, read_state
from mergeflow.errors import MergeflowError
from mergeflow.evaluation.averages import mean
from mergeflow.evaluation.scoring import CandidateScorer
from mergeflow.modalities.heads import Head
from mergeflow.modality import Examples, Model
from mergeflow.search.candidates import score_all
from mergeflow.search.grid import grid
from tasks.models import choose_device, load_base_head, load_examples, load_model
from tasks.project.stage import CHOICES, STUDIES, StageIO

State = dict[str, Tensor]
Heads = Mapping[str, dict[str, Tensor]]
"""By task the weights of its head."""
MODEL_NAME = layout.MODEL_FILE.removesuffix(".safetensors")
Accuracy = dict[str, float]


@dataclass(frozen=True)
class TrainingRun:
    """One run of studies/params.yaml, as the stage `train` left it.

    Attributes:
        io: the study's files.
        name: the run's name.
        tasks: those of interest.
    """

    io: StageIO
    name: str
    tasks: Sequence[str]

    @property
    def seeds(self) -> list[int]:
        """The seeds of this run, which may be fewer than the project's."""
        folder = self.io.dep(layout.study_run(self.name))
        return sorted(int(path.name.removeprefix("seed_")) for path in folder.glob("seed_*"))

    @property
    def tuned(self) -> list[str]:
        """The tasks of interest that this run has an expert of."""
        folder = self.io.dep(layout.study_run(self.name)) / f"seed_{self.seeds[0]}" / "experts"
        return [task for task in self.tasks if (folder / task).exists()]

    def expert(self, seed: int, task: str) -> State:
        """Return θ_t; of an iterative run that of the last round."""
        return self._state(f"seed_{seed}/experts/{task}/{MODEL_NAME}")

    def experts(self, seed: int) -> dict[str, State]:
        return {task: self.expert(seed, task) for task in self.tasks}

    def heads(self, seed: int) -> Heads:
        """Return the heads that came out of the training of the experts, where there are any."""
        folder = self.io.dep(layout.study_run(self.name)) / f"seed_{seed}" / "experts"
        files = {task: folder / task / layout.HEAD_FILE for task in self.tasks}
        return {task: read_state(file) for task, file in files.items() if file.exists()}

    def epoch(self, seed: int, task: str, number: int) -> State:
        """Return θ_t after an epoch of a run with `keep_epochs`.

        Args:
            seed: of the run.
            task: the task's name.
            number: of the epoch, from 1.
        """
        return self._state(f"seed_{seed}/experts/{task}/epochs/epoch_{number:03}")

    def training(self, seed: int, task: str) -> dict[str, Any]:
        """Return an expert's training.json; `epochs` are its rows."""
        return self._json(f"seed_{seed}/experts/{task}/training.json")

    def settings(self, seed: int) -> dict[str, Any]:
        """Return the settings of `finetune` that the run was trained with."""
        settings: dict[str, Any] = self.training(seed, self.tasks[0])["settings"]
        return settings

    def joint_settings(self, seed: int) -> dict[str, Any]:
        """Return the settings of `finetune` that a joint run was trained with."""
        settings: dict[str, Any] = self._json(f"seed_{seed}/model/training.json")["settings"]
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

    def start(self, seed: int) -> State:
        """Return θ̄(N−1), from which the last round of an iterative run started."""
        return self._state(f"seed_{seed}/start")

    def cost(self, seed: int) -> dict[str, Any]:
        """Return one seed's `mergeflow.training.Cost` as JSON, and of an iterative run `rounds`: processor seconds."""
        record, own = self.io.cost(f"{STUDIES}:train@{self.name}"), f"seed_{seed}"
        return {**record["training"][own], "rounds": record.get("rounds", {}).get(own, [])}

    def _state(self, name: str) -> State:
        return read_state(self.io.dep(f"{layout.study_run(self.name)}/{name}.safetensors"))

    def _json(self, name: str) -> Any:
        return json.loads(self.io.dep(f"{layout.study_run(self.name)}/{name}").read_text())


@dataclass(frozen=True)
class Chosen:
    """A candidate chosen on validation, and the one look at its test accuracy.

    Attributes:
        args: the chosen arguments.
        validation: accuracy per task.
        test: accuracy per task.
        state: the merged model.
    """

    args: dict[str, Any]
    validation: Accuracy
    test: Accuracy
    state: State


class StudyInputs:
    """The inputs of one study; examples are opened once, weights are swapped in place and judged once."""

    def __init__(self, io: StageIO) -> None:
        self.io = io
        self.tasks = list(io.section("tasks"))
        self.seeds: list[int] = list(io.section(f"{CHOICES}:seeds"))
        self.device = choose_device(io)
        self.heads: Heads = {}
        self._examples: dict[tuple[str, str], Examples] = {}
        self._judged: dict[tuple[str, str, str], float] = {}  # fingerprint, split, task → accuracy

    def __copy__(self) -> "StudyInputs":
        part = type(self).__new__(type(self))
        vars(part).update(vars(self))
        return part

    def __getstate__(self) -> dict[str, Any]:
        """Go to another process without what was opened here, which opens there when it is asked for."""
        return {key: vars(self)[key] for key in ("io", "tasks", "seeds", "device", "heads")} | {
            "_examples": {},
            "_judged": {},
        }

    def first(self, count: int) -> "StudyInputs":
        """Return the same for the first `count` tasks alone; examples and model are shared.

        Raises:
            MergeflowError: there are fewer tasks.
        """
        if not 1 <= count <= len(self.tasks):
            raise MergeflowError(
                f"a study asks for the first {count} tasks, but there are {len(self.tasks)}: {', '.join(self.tasks)}. "
                "Ask for fewer in studies/params.yaml, or add tasks."
            )
        assert self.model  # made before the copy, so that both have the same
        part = copy(self)
        part.tasks = self.tasks[:count]
        return part

    def blind(self) -> "StudyInputs":
        """Return the same for choosing something: opening a test split is an error, even one that is open already.

        Example:
            >>> inputs.blind().accuracy(merged, "test")  # doctest: +SKIP
            Traceback (most recent call last):
            mergeflow.errors.MergeflowError: ... reads outputs/data/test/digits where it must not: ...
        """
        assert self.model  # made before the copy, so that both have the same
        part = copy(self)
        part.io = replace(self.io, withheld=(*self.io.withheld, f"{layout.DATA}/test"))
        part._examples = {key: one for key, one in self._examples.items() if key[0] != "test"}
        return part

    def with_heads(self, heads: Heads) -> "StudyInputs":
        """Return the same with these heads, of tasks whose heads are trained beside the model.

        Args:
            heads: of every task.
        """
        assert self.model  # made before the copy, so that both have the same
        part = copy(self)
        part.heads, part._examples, part._judged = heads, {}, {}
        return part

    @cached_property
    def base(self) -> State:
        """The base θ0."""
        return read_state(self.io.dep(layout.BASE_MODEL))

    def run(self, name: str) -> TrainingRun:
        return TrainingRun(self.io, name, self.tasks)

    def examples(self, split: str) -> dict[str, Examples]:
        """Return every task's examples of a split.

        Raises:
            MergeflowError: A task's head is trained beside the model, and `with_heads` has not said which one counts.
        """
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
                    "the model: every expert has its own. A study of such tasks names them: inputs.with_heads("
                    "inputs.run(NAME).heads(seed)); of the papers' studies glue does."
                )
            head.load_state_dict(self.heads[task])
        return head

    def scorer(self, experts: Mapping[str, State]) -> CandidateScorer:
        """Return what merges and scores candidates of these experts on validation."""
        batch_size = self.io.section("evaluation").batch_size
        return CandidateScorer(self.model, self.examples("validation"), self.base, experts, batch_size=batch_size)

    def accuracy(self, state: State, split: str, tasks: Sequence[str] | None = None) -> Accuracy:
        """Return the accuracy of a model on each task, a fraction in [0, 1]; the same weights are judged once.

        Args:
            state: the model's weights.
            split: train, validation or test.
            tasks: names of the tasks to look at; all of the study by default.
        """
        opened, digest = self.examples(split), fingerprint(state)
        keys = {task: (digest, split, task) for task in tasks or self.tasks}
        new = {task: opened[task] for task, key in keys.items() if key not in self._judged}
        for task, found in (self.scorer({}).state(state, new) if new else {}).items():
            self._judged[keys[task]] = found
        return {task: self._judged[key] for task, key in keys.items()}

    def individual(self, experts: Mapping[str, State], split: str) -> Accuracy:
        """Return every expert's accuracy on its own task."""
        return {task: self.accuracy(state, split, [task])[task] for task, state in experts.items()}

    def choose(self, experts: Mapping[str, State], method: str, values: Mapping[str, Sequence[Any]]) -> Chosen:
        """Try every combination of the grid on validation, take the best by mean accuracy, look at test once.

        Args:
            experts: their weights by name.
            method: a name of the catalog.
            values: argument → the values to try.
        """
        scorer = self.blind().scorer(experts)
        best = max(score_all(method, grid(method, values), scorer.candidate, mean), key=lambda found: found.value)
        state = scorer.merge(best.call)
        return Chosen(best.varied, best.scores, self.accuracy(state, "test"), state)

    @cached_property
    def model(self) -> Model:
        return load_model(self.io, layout.BASE_MODEL, self.device)


def mean_accuracy(accuracy: Accuracy) -> float:
    """Return the mean over tasks, in %."""
    return 100 * mean(accuracy)
