"""Several steps in one recipe give the bits of as many merges, one after the other, and leave nothing behind."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, make_recipe, merge
from tests.merging.helpers import kill_at

NAMES = [f"layers.{block}.{part}.weight" for block in range(3) for part in ("attn", "mlp")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A base and three experts of six matrices and a counter."""
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(12, 20, generator=generator) for name in NAMES} | {"steps": torch.tensor(3)}
    write_checkpoint("base.safetensors", base)
    for name in "abc":
        expert = {key: base[key] + 0.1 * torch.randn(12, 20, generator=generator) for key in NAMES}
        write_checkpoint(f"{name}.safetensors", expert | {"steps": torch.tensor(4)})
    return tmp_path


def paths(names):
    return {name: f"{name}.safetensors" for name in names}


BASE = "base.safetensors"
AVERAGE = {"method": "average", "experts": paths("ab")}
SLERP = {"method": "slerp", "args": {"t": 0.3}, "experts": paths("ab")}
TIES = {"method": "ties", "base": BASE, "experts": paths("ab")}
CART = {"method": "cart", "experts": paths("ab"), "args": {"rank_ratio": 0.3}}


def on(method, **more):
    return {"method": method, "base": BASE, "experts": {"s": "step:s", "c": "c.safetensors"}, **more}


@pytest.mark.parametrize(
    ("step", "top", "written"),
    [
        (AVERAGE, on("task_arithmetic"), False),
        (AVERAGE | {"dtype": "bfloat16"}, on("task_arithmetic", dtype="float16"), False),
        (TIES, on("slerp"), False),  # blocks, read as whole tensors
        (SLERP, on("slerp"), False),  # whole tensors, read as such
        (SLERP, on("task_arithmetic"), True),  # whole tensors, read as blocks
        (AVERAGE, on("ties"), True),  # read four times
        (CART, on("cart"), False),
        (TIES, {"method": "ties", "base": "step:s", "experts": paths("bc")}, True),
        (SLERP, {"method": "slerp", "experts": {"c": "c.safetensors", "s": "step:s"}}, False),
        (SLERP, {"method": "passthrough", "experts": ["step:s"]}, True),
        (TIES, {"method": "passthrough", "experts": ["step:s"]}, False),
    ],
)
def test_two_steps_are_two_merges(folder, step, top, written):
    recipe = {"steps": {"s": step}, **top}
    plan = check_recipe({**recipe, "out": "one.safetensors"})
    assert plan.written == (("s",) if written else ())
    assert ("written first" if written else "computed as it is read") in plan.steps["s"]
    made = merge(recipe, "one.safetensors")
    apart = merge(step, "s.safetensors")
    two = merge(json.loads(json.dumps(top).replace("step:s", "s.safetensors")), "two.safetensors")
    assert made.fingerprint == two.fingerprint
    assert made.inputs == two.inputs | {f"step:s/{owner}": digest for owner, digest in apart.inputs.items()}
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    again = merge({**json.loads(made.recipe.record()), "out": "again.safetensors"})
    assert (again.fingerprint, again.inputs) == (made.fingerprint, made.inputs)


def test_three_steps_in_a_folder_of_shards(folder):
    """The first is read by two others, so that it is written; one of these is computed as it is read."""
    steps = {
        "third": {"method": "slerp", "experts": {"x": "step:first", "c": "c.safetensors"}},
        "second": {"method": "ties", "base": BASE, "experts": {"x": "step:first", "c": "c.safetensors"}},
        "first": AVERAGE,
    }
    recipe = {"method": "slerp", "experts": ["step:second", "step:third"], "steps": steps, "shard_size": 1000}
    plan = check_recipe(recipe)
    assert plan.written == ("first",)
    made = merge(recipe, "out")
    merge(AVERAGE, "first.safetensors")
    for name in ("second", "third"):
        merge(json.loads(json.dumps(steps[name]).replace("step:first", "first.safetensors")), f"{name}.safetensors")
    experts = {name: f"{name}.safetensors" for name in ("second", "third")}
    apart = merge({"method": "slerp", "experts": experts, "shard_size": 1000}, "apart")
    assert made.fingerprint == apart.fingerprint
    assert len(list((folder / "out").glob("*.safetensors"))) > 2
    assert "| step:second/c | `c.safetensors` |" in (folder / "out/README.md").read_text()


def test_a_step_without_a_base_of_its_own_reads_the_first_expert_once(folder):
    read = []
    recipe = make_recipe({"method": "average", "experts": paths("abc"), "out": "o.safetensors"})
    merge(recipe, progress=lambda done, total: read.append((done, total)), workers=1)
    size = sum(t.nbytes for name, t in open_checkpoint("a.safetensors").items() if name != "steps")
    assert max(done for done, _ in read[:-1]) == 3 * size
    assert merge({**AVERAGE, "base": "a.safetensors"}, "p.safetensors").inputs == merge(AVERAGE, "q.safetensors").inputs


def test_what_is_to_be_said_of_a_step_is_said(folder):
    """Warnings and notes of a step's own inputs were lost."""
    for name, width in (("base", 1e-6), ("a", 1e-3)):
        (folder / name).mkdir()
        write_checkpoint(f"{name}/model.safetensors", {"w": torch.zeros(2), "steps": torch.tensor(ord(name[0]))})
        (folder / name / "config.json").write_text(json.dumps({"rms_norm_eps": width}))
    write_checkpoint("a/model.safetensors", {"model.w": torch.ones(2), "model.steps": torch.tensor(3)})
    step = {"method": "average", "base": "base", "experts": {"a": "a"}}
    made = merge({"steps": {"s": step}, "method": "average", "base": "base", "experts": {"s": "step:s"}, "out": "o"})
    assert made.warnings == (
        "step 's', rms_norm_eps: base 1e-06; 'a' 0.001",
        "integers: 'steps' of 'a' differs from the base's, which the result has",
    )
    assert made.notes == ("step 's', names of 'a' are taken without their prefix 'model.'",)


def test_the_record_keeps_the_order_of_experts(folder):
    """SLERP goes from the first expert to the second: a replay that sorted them would be another model."""
    made = merge(
        {"method": "slerp", "args": {"t": 0.2}, "experts": {"b": "b.safetensors", "a": "a.safetensors"}},
        "o.safetensors",
    )
    again = merge({**json.loads(made.recipe.record()), "out": "p.safetensors"})
    assert again.fingerprint == made.fingerprint


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (on("average", steps={"t": AVERAGE}), r"unknown step 's'.*\n.*'t' is read by nothing"),
        (on("average", steps={"s": on("slerp")}), "steps read each other in a circle: s ← s"),
        (on("average", steps={"s": {**AVERAGE, "out": "x"}}), "`out` belongs to the whole recipe"),
        (on("average", steps={"s": {**AVERAGE, "args": {"scal": 1}}}), r"step 's'.*unknown argument.*'scal'"),
        (on("average", steps={"s": "x"}), "expected a merge .* or a mixture, found 'x'"),
        (on("average", steps={"s/t": AVERAGE}), "the name 's/t' of a step: use letters"),
        (on("average", steps={"s": []}), "no slices"),
        (on("average", steps={"s": [{"model": "a", "layers": [3, 1]}]}), r"0 ≤ first < end.*\[3, 1\]"),
        ({"slices": [{"model": "a"}], "experts": ["b"]}, "`slices` is the whole model"),
    ],
)
def test_faulty_steps(values, message):
    with pytest.raises(MergeflowError, match=message):
        make_recipe(values)


def test_faults_inside_a_step_name_it(folder):
    with pytest.raises(MergeflowError, match=r"step 's': .*no checkpoint at 'gone.safetensors'"):
        check_recipe(on("average", steps={"s": {"method": "average", "experts": ["gone.safetensors"]}}))
    wide = {"method": "cart", "experts": paths("ab"), "args": {"matrices": ["nothing.*"]}}
    with pytest.raises(MergeflowError, match=r"step 's', method 'cart': the pattern 'nothing.\*'"):
        check_recipe(on("average", steps={"s": wide}))
    with pytest.raises(MergeflowError, match=r"out 'a.safetensors' would overwrite the input"):
        merge(on("average", steps={"s": AVERAGE}), "a.safetensors")


@pytest.mark.slow
def test_killed_between_steps_it_resumes(folder):
    values = {"steps": {"s": SLERP}, **on("ties"), "out": "out", "shard_size": 2000}
    kill_at(values, ".out.partial/model-00002")
    assert not (folder / "out").exists()
    step = folder / ".out.steps/s/mergeflow.json"
    before = step.stat().st_mtime_ns
    (first,) = (folder / ".out.partial").glob("model-00001-*")
    shard = first.stat().st_mtime_ns
    seen = []
    made = merge(values, resume=True, progress=lambda *_: seen.append(step.stat().st_mtime_ns if step.exists() else 0))
    assert set(seen[:-1]) == {before}
    assert (folder / "out" / first.name).stat().st_mtime_ns == shard
    plain = merge({**values, "out": "plain"})
    assert (made.fingerprint, made.inputs) == (plain.fingerprint, plain.inputs)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_a_changed_input_makes_its_step_anew(folder):
    values = {"steps": {"s": SLERP}, **on("ties"), "out": "out.safetensors"}
    kill_at(values, "out.safetensors")
    with open_checkpoint("a.safetensors") as state:
        other = {name: state[name].clone() for name in state}
    other[NAMES[0]] += 1
    write_checkpoint("a.safetensors", other)
    made = merge(values, resume=True)
    assert made.fingerprint == merge({**values, "out": "plain.safetensors"}).fingerprint


def test_a_folder_of_somebody_else_stays(folder):
    (folder / ".out.safetensors.steps").mkdir()
    (folder / ".out.safetensors.steps/mine").write_text("precious")
    with pytest.raises(MergeflowError, match=r"where results of steps belong, was not made by a merge: move it"):
        merge({"steps": {"s": SLERP}, **on("ties"), "out": "out.safetensors"})
    assert (folder / ".out.safetensors.steps/mine").read_text() == "precious"


def test_the_recipes_of_the_page_are_valid():
    page = (Path(__file__).parents[2] / "docs/recipes.md").read_text()
    recipes = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    assert sum("steps" in values for values in recipes) == 2
    assert {"slices", "mixture", "tokenizer", "ignore"} <= {key for values in recipes for key in values}
    experts = {"base": "models/base", "experts": {"chat": "models/chat", "code": "models/code"}}
    for values in recipes:  # some are parts of a recipe
        make_recipe(values if "out" in values else {"method": "ties", **experts, **values, "out": "merged"})


def test_faults_of_a_step_are_told_once_a_line_each():
    step = {"method": "ties", "experts": ["p", "q"], "weights": [1]}
    with pytest.raises(MergeflowError) as error:
        make_recipe({"method": "average", "experts": {"a": "step:x", "b": "b"}, "steps": {"x": step}})
    assert str(error.value).splitlines() == [
        "recipe has 2 faults:",
        "  - steps: step 'x': 1 weights for 2 experts: give one per expert",
        "  - steps: step 'x': base: is missing, and the result of 'ties' depends on it",
    ]
