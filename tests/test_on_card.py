"""The card of `tests.card` under the whole house: every stage of the graph, and what takes a device."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml

from mergeflow.checkpoints import fingerprint, open_checkpoint
from mergeflow.commands import language
from mergeflow.commands import sweep as sweeping
from mergeflow.data import load_manifest
from mergeflow.evaluation.accuracy import accuracies, losses
from mergeflow.evaluation.adamerging import AdamergeOrder, entropies, entropy_gradient, learn_coefficients
from mergeflow.evaluation.memory import estimate_coefficients_memory
from mergeflow.evaluation.scoring import CandidateScorer
from mergeflow.merging import configure, make_recipe, merge, prepare
from mergeflow.merging.compression.compressor import configure_compressor
from mergeflow.merging.compression.suite_file import compress
from mergeflow.merging.execution.engine import check_room
from mergeflow.merging.files.plan import open_inputs
from mergeflow.modalities.catalog import MODALITIES, open_recorded
from mergeflow.modalities.causal.generation import continued
from mergeflow.modalities.causal.modality import PackedText, perplexity
from mergeflow.modalities.causal.model import LanguageModule
from mergeflow.modalities.causal.sections import Generation
from mergeflow.modalities.heads import load_head
from mergeflow.modalities.served import SERVED
from mergeflow.modalities.serving import read_model
from mergeflow.modalities.vision.models import image_model, load_clip
from mergeflow.search.sweep import TABLE
from mergeflow.training import FineTuneSettings, fine_tune
from mergeflow.training.arithmetic import arithmetic
from registry.artifacts import ModelFiles, read_evidence, save_pyfunc
from registry.stage import evaluate_version
from registry.store import connect
from registry.versions import find_stored, load
from tasks.project.graph import load_graph
from tasks.project.parameters import EvaluationSection
from tests.card import card
from tests.causal.small_project import TASKS as TALES
from tests.causal.small_project import finished_project as causal_project
from tests.command import invoke
from tests.evaluation.small import TASKS, shared_world, sweep_values
from tests.evaluation.test_entropy import order, recipe_values
from tests.evaluation.test_statistics import call
from tests.flows.small_project import registry_template
from tests.merging.helpers import awkward
from tests.project_folder import change_params
from tests.text.small_project import TASKS as TEXTS
from tests.text.small_project import finished_project as text_project
from tests.toy_project import PIPELINE, make_toy_project, run_pipeline
from tests.training.test_fine_tune import Killed, kill_at

pytestmark = pytest.mark.slow

STAGES = (*PIPELINE, "figures", "register")
FILES = ("base.safetensors", *(f"experts/{task}.safetensors" for task in TASKS))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def toy(folder: Path, device: str) -> Path:
    make_toy_project(folder, steps=12, save_every=5)
    change_params(folder, {"run.device": device, "registry.model": "nets", "registry.tolerance": 0.5})
    (folder / "mlflow.db").write_bytes(registry_template().read_bytes())
    run_pipeline(folder, STAGES)
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with card():
        return toy(tmp_path_factory.mktemp("card") / "project", "cuda")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_world(tmp_path_factory)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_project(tmp_path_factory) / "outputs"


@pytest.fixture(scope="module")
def tales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return causal_project(tmp_path_factory) / "outputs"


def test_every_stage_runs_and_leaves_what_it_leaves_on_the_processor(project: Path, tmp_path: Path) -> None:
    assert set(STAGES) == {stage.name for stage in load_graph(Path(__file__).parents[1]).values()}
    plain = toy(tmp_path / "project", "cpu")
    models = [path.relative_to(plain) for path in sorted((plain / "outputs").rglob("*.safetensors"))]
    assert models
    for path in models:
        with open_checkpoint(project / path) as actual, open_checkpoint(plain / path) as expected:
            assert fingerprint(dict(actual)) == fingerprint(dict(expected)), path
    for name in ("results/test.json", "results/selection.json", "sweeps/cart.json"):
        assert (project / "outputs" / name).read_bytes() == (plain / "outputs" / name).read_bytes()


def serve(project: Path) -> None:
    """Answer rows as a model server does, which takes a card where there is one."""
    import pandas as pd  # type: ignore[import-untyped]

    rows = pd.DataFrame({f"x{k}": [0.5, -1.0] for k in range(8)} | {"task": ["left", "right"]})
    answer = load(connect(project_root=project), "nets").predict(rows)
    assert [round(sum(row.values()), 6) for row in answer["probabilities"]] == [1.0, 1.0]


def judge_again(project: Path) -> None:
    store = connect(project_root=project)
    version = find_stored(store, "nets", 1)
    evidence = read_evidence(store, version)
    splits = {task: project / f"outputs/data/validation/{task}" for task in evidence.accuracy}
    assert evaluate_version(store, version, splits, evidence, EvaluationSection(), "cuda").accuracy == evidence.accuracy


def opened(world: Path, device: str, split: str = "validation") -> dict[str, Any]:
    heads = {task: load_head(world / "heads" / f"{task}.safetensors").to(device) for task in TASKS}
    open_split = MODALITIES.get("vision").open
    return {task: open_split(task, world / "data" / task, split, heads[task], torch.device(device)) for task in TASKS}


@arithmetic()
def judge(world: Path, out: Path, device: str) -> Any:
    """Accuracies, losses, entropies and their gradient, and a candidate merged there."""
    model, tasks = image_model(load_clip("pocket-clip", device=device)), opened(world, device)
    base, *experts = (dict(open_checkpoint(world / name)) for name in FILES)
    model.load(experts[0])
    gradient_of_entropy, gradients = entropy_gradient(model, tasks, experts[0], 4)
    plain = {name: value.cpu() for name, value in gradients.items()}
    scorer = CandidateScorer(model, tasks, base, dict(zip(TASKS, experts, strict=True)), device=device)
    calls = [configure("average"), configure("cart"), configure("cart", {"scale": 2.0})]
    scores = [scorer.candidate(call) for call in calls]
    return (
        accuracies(model, tasks, 4),
        losses(model, tasks, 4),
        entropies(model, tasks, base),
        gradient_of_entropy,
        plain,
        scores,
    )


def train(world: Path, out: Path, device: str) -> Any:
    """Three steps of a transformer, killed after the second."""
    settings = FineTuneSettings(steps=3, batch_size=4, warmup=0.0, save_every=1)
    for report in (kill_at(2), lambda done, total: None):
        model, data = image_model(load_clip("pocket-clip", device=device)), opened(world, device, "train")["red"]
        with suppress(Killed):
            fine_tune(model, [data], settings, 0, out / "saved.pt", lambda: 0.5, report)
    return {name: value.cpu() for name, value in model.state().items()}


def sweep(world: Path, out: Path, device: str) -> Any:
    methods = {"average": {}, "task_arithmetic": {"scale": [0.2, 0.4]}}
    file = out / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep_values(world, device=device, methods=methods)))
    done = invoke(sweeping.add_commands, "sweep", file, "--out", out / "swept")
    assert done.exit_code == 0, done.output
    return pq.read_table(out / "swept" / TABLE).drop_columns(["method", "args"]).to_pylist()


def take_statistics(world: Path, out: Path, device: str) -> Any:
    states = []
    for kind in ("fisher", "gram"):
        done = call(world, kind, "red", out / f"{kind}.safetensors", "--samples", "4", "--device", device)
        assert done.exit_code == 0, done.output
        states.append({name: value.clone() for name, value in open_checkpoint(out / f"{kind}.safetensors").items()})
    return states


@arithmetic()
def adapt(world: Path, out: Path, device: str) -> Any:
    assert estimate_coefficients_memory(order(world), device).works
    learned = learn_coefficients(make_recipe({**recipe_values(world, steps=2), "device": device}), order(world), out)
    return learned.coefficients, learned.losses


def combine(world: Path, out: Path, device: str) -> Any:
    base, experts = awkward(torch.float32)
    values = {**recipe_values(world), "method": "average", "device": device, "out": str(out / "merged.safetensors")}
    values |= {"steps": {"both": {**recipe_values(world), "method": "ties"}}, "experts": {"both": "step:both"}}
    values["experts"] |= {"red": str(world / "experts/red.safetensors")}
    made = make_recipe(values)
    if device != "cpu":
        with open_inputs(made) as inputs:
            assert check_room(inputs.call, inputs.model, inputs.base.infos, device)
    with open_checkpoint(merge(made).path) as merged:
        copied = {name: merged[name].clone() for name in merged}
    packed = compress(configure_compressor("tall_mask"), base, experts, device=device).tensors
    return prepare(configure("cart"), base, experts, device=device).direction, packed, copied


def adapt_texts(outputs: Path, out: Path, device: str) -> Any:
    """Learn coefficients on texts, whose base says itself what model it is."""
    base = str(outputs / "base/model.safetensors")
    experts = {task: str(outputs / f"experts/{task}/model.safetensors") for task in TEXTS}
    folders = {task: str(outputs / f"data/validation/{task}") for task in TEXTS}
    heads = {task: str(outputs / f"experts/{task}/head.safetensors") for task in TEXTS}
    recipe = {"method": "adamerging", "args": {"steps": 2}, "base": base, "experts": experts, "device": device}
    order = AdamergeOrder(base, folders, heads)
    learned = learn_coefficients(make_recipe(recipe), order, out)
    return learned.coefficients, learned.losses


def answer_texts(outputs: Path, out: Path, device: str) -> Any:
    record = dict(open_checkpoint(outputs / "base/model.safetensors").metadata)
    heads = {task: outputs / f"experts/{task}/head.safetensors" for task in TEXTS}
    manifests = {task: load_manifest(outputs / f"data/manifests/{task}") for task in TEXTS}
    decoding, model = manifests["mood"]["decoding"], {"modality": "text", "pretrained": "inputs/base"}
    transforms = {task: manifest["transforms"] for task, manifest in manifests.items()}
    weights = outputs / "base/model.safetensors"
    files = ModelFiles(weights, heads, model, decoding, record=record, transforms=transforms)
    save_pyfunc(out / "model", files)
    loaded = read_model(out / "model/artifacts/model", torch.device(device))
    rows = {"task": ["mood", "same"], "text": ["the red cat is nice", "the cat is red"], "text_pair": [None, "red cat"]}
    return [list(row.values()) for row in SERVED.get("text").answer(loaded, rows)["probabilities"]]


def tell_tales(outputs: Path, out: Path, device: str) -> Any:
    """Judge a causal model on texts and on questions, tune it for two steps, and let it go on from a text."""
    modality, model = open_recorded(outputs / "base/model.safetensors", device)
    assert isinstance(model.module, LanguageModule)
    model.module.whole.tie_weights()  # `to` makes two of one weight: tensors here are a class of their own
    places = {task: outputs / f"data/validation/{task}" for task in TALES}
    tasks = {task: modality.open(task, places[task], "validation", None, torch.device(device)) for task in TALES}
    measures = accuracies(model, tasks, 4), losses(model, tasks, 4), entropies(model, tasks, model.state())
    text = tasks["trees"]
    assert isinstance(text, PackedText)
    surprise = perplexity(model, text)
    settings = FineTuneSettings(steps=2, batch_size=4, warmup=0.0)
    fine_tune(model, [tasks["trees"]], settings, 0, out / "saved.pt", lambda: 0.5)
    written = continued(model.module, [[100, 101]], Generation(tokens=5), 256)
    return *measures, surprise, {name: value.cpu() for name, value in model.state().items()}, written


def ask_for_perplexity(outputs: Path, out: Path, device: str) -> Any:
    base, data = str(outputs / "base/model.safetensors"), str(outputs / "data/validation/trees")
    words = ["perplexity", base, "--base", base, "--data", data, "--device", device, "--json"]
    done = invoke(language.add_commands, *words, catch_exceptions=False)
    return json.loads(done.stdout)[base]["trees"]["perplexity"]


USES: list[Callable[[Path, Path, str], Any]] = [judge, train, sweep, take_statistics, adapt, combine]
TEXT_USES: list[Callable[[Path, Path, str], Any]] = [adapt_texts, answer_texts]
CAUSAL_USES: list[Callable[[Path, Path, str], Any]] = [tell_tales, ask_for_perplexity]


@pytest.fixture(scope="module")
def on_card(
    project: Path, world: Path, texts: Path, tales: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    with card():
        serve(project)
        judge_again(project)
        used = [(use, home) for uses, home in ((USES, world), (TEXT_USES, texts), (CAUSAL_USES, tales)) for use in uses]
        return {use.__name__: use(home, tmp_path_factory.mktemp(use.__name__), "cuda") for use, home in used}


@pytest.mark.parametrize(
    ("use", "home"),
    [(use, home) for uses, home in ((USES, "world"), (TEXT_USES, "texts"), (CAUSAL_USES, "tales")) for use in uses],
)
def test_what_takes_a_device(
    use: Callable[[Path, Path, str], Any],
    home: str,
    tmp_path: Path,
    on_card: dict[str, Any],
    request: pytest.FixtureRequest,
) -> None:
    on_cpu = use(request.getfixturevalue(home), tmp_path, "cpu")
    torch.testing.assert_close(on_card[use.__name__], on_cpu, rtol=1e-3, atol=1e-5)
