"""Stage `advise`: before any candidate is scored, which λ to try, how tasks are related, what unlearning costs.

Nothing depends on it but report and registry, so that it must not end a run: what fails becomes a remark.
"""

from collections.abc import Mapping

from mergeflow.advice_document import ADVICE
from mergeflow.analysis.provable.advising import Advice, advise, or_remark
from mergeflow.analysis.provable.answers import Answers
from mergeflow.analysis.provable.questions import ask_all, one_each
from mergeflow.documents import write_document
from mergeflow.layout import BASE_MODEL
from mergeflow.modalities.subset import Subset
from mergeflow.modality import State
from tasks.models import choose_device, load_for_experts, load_model, load_states
from tasks.project.stage import StageIO

SAMPLES = 200  # of each task, from validation, without their labels


def run(io: StageIO) -> None:
    """Write `outputs/results/advice.json`."""
    tasks = list(io.section("tasks"))
    remarks: list[str] = []
    advice = or_remark("advice", lambda: _advice(io, tasks), remarks, survives=Exception)
    write_document(io.out(ADVICE), (advice or Advice(tuple(tasks), remarks=remarks)).as_json())


def _advice(io: StageIO, tasks: list[str]) -> Advice:
    if len(tasks) < 2:
        return Advice(tuple(tasks), remarks=["one task has no advice: there is nothing to merge it with."])
    base, experts = load_states(io, tasks)
    return advise(base, experts, lambda: _answers(io, base, experts), survives=Exception)


def _answers(io: StageIO, base: State, experts: Mapping[str, State]) -> Answers:
    device = choose_device(io)
    examples = load_for_experts(io, "validation", experts, device)
    sources = {task: one_each(Subset.first(found, SAMPLES)) for task, found in examples.items()}
    batch_size = io.section("evaluation").batch_size
    return ask_all(load_model(io, BASE_MODEL, device), base, experts, sources, batch_size)
