"""Bad input: one clear error that names the thing and the way out, and nothing half-written."""

import json
import os
import shutil

import pytest
import torch

from mergeflow.checkpoints import fingerprint, open_checkpoint, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, configure, load_recipe, make_recipe, merge, prepare
from tests.merging.helpers import awkward, fitting, recipe, statistics


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "tis"}, "unknown method 'tis': did you mean 'ties'"),
        ({"metod": "ties"}, "unknown key of a recipe 'metod': did you mean 'method'"),
        ({"args": {"scael": 1}}, "unknown argument of task_arithmetic 'scael': did you mean 'scale'"),
        ({"method": "ties", "args": {"keep": 1.5, "trim": "row"}}, r"keep: .* found 1.5; trim: .* found 'row'"),
        ({"args": {"scale": float("nan")}}, "scale: must be a finite number"),
        ({"experts": []}, "no experts"),
        ({"experts": ["a", "a"]}, "the same path is twice"),
        ({"weights": [1.0]}, "1 weights for 3 experts"),
        ({"weights": {"expert9": 1.0}}, "unknown experts"),
        ({"method": "dare", "args": {"keep": 0.5}}, "only `then: ties` reads keep; .* is 1 − drop"),
        ({"method": "slerp"}, "method 'slerp' merges 2 experts, found 3"),
        ({"method": "consensus", "args": {"min_agree": 4}}, "min_agree is 4, but there are 3 experts"),
        ({"method": "consensus", "experts": ["a"]}, "min_agree is 2, but there is 1 expert: .* Choose 1 at most"),
        ({"method": "lines", "args": {"of": "consensus", "of_args": {"min_agree": 4}}}, "min_agree is 4"),
        ({"method": "magmax", "weights": [1, 2, 3]}, "takes no weights"),
        ({"method": "average", "weights": [1, -1, 0]}, "sum to 0"),
        ({"method": "ties", "matrices": "all"}, "treats no matrices apart"),
        ({"method": "fisher"}, "needs the statistic 'fisher'"),
        ({"data": {"fishr": {}}}, "unknown statistic 'fishr': did you mean 'fisher'"),
        ({"data": {"gram": {"expert9": "x"}}}, "unknown expert of the statistic 'gram' 'expert9'"),
        ({"dtype": "int8"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"shard_size": "big"}, "expected a size such as 5GB"),
        ({"experts": {"base": "x"}}, "cannot be named 'base'"),
        ({"only": []}, "only: an empty list merges no tensor: give patterns .* or leave `only` out"),
        ({"only": {}}, "only: must be a list, found {}"),
        ({"weights": []}, r"weights: expected numbers, one per expert, .* found \[\]"),
        ({"out": " "}, "out: a path must hold some character"),
    ],
)
def test_recipes_are_validated_whole_before_any_file_is_opened(changes, message, tmp_path):
    with pytest.raises(MergeflowError, match=message):
        recipe(tmp_path, **changes)


def test_recipe_files_and_overrides(files):
    path = files / "recipe.yaml"
    path.write_text(f"method: ties\nbase: {files}/base.safetensors\nexperts: [{files}/expert0.safetensors]\n")
    loaded = load_recipe(path, ["args.keep=0.5", "out=x.safetensors", "matrices=null"][:2])
    assert dict(loaded.args)["keep"] == 0.5
    assert loaded.out == "x.safetensors"
    assert make_recipe(json.loads(loaded.record())) == loaded
    with pytest.raises(MergeflowError, match="not of the form key=value"):
        load_recipe(path, ["args.keep"])
    with pytest.raises(MergeflowError, match="did you mean 'keep'"):
        load_recipe(path, ["args.kepe=1"])
    path.write_text("- a\n")
    with pytest.raises(MergeflowError, match="holds a list"):
        load_recipe(path)
    path.write_text("a: [")
    with pytest.raises(MergeflowError, match="not valid YAML"):
        load_recipe(path)
    with pytest.raises(MergeflowError, match="cannot read recipe"):
        load_recipe(files / "none.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("method: ties\nbase: b\nexperts: {cars: a, cars: c}\n", "the key 'cars' is given twice, in line 3: keep one"),
        ("method: ties\nbase: b\nexperts: [a]\nmethod: average\n", "the key 'method' is given twice, in lines 1 and 4"),
        ('{"method": "ties", "base": "b", "experts": ["a"],\n "base": "c"}', "'base' is given twice, in lines 1 and 2"),
    ],
)
def test_a_key_that_stands_twice_is_refused(tmp_path, text, message):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(MergeflowError, match=rf"recipe\.yaml' is not valid YAML: .*{message}"):
        load_recipe(tmp_path / "recipe.yaml")


def test_merged_mappings_may_be_overridden(tmp_path):
    text = "method: ties\nbase: b\nargs: {<<: &more {keep: 0.5}, scale: 2}\nexperts: {a: a, <<: {a: x, b: y}}\n"
    (tmp_path / "recipe.yaml").write_text(text)
    loaded = load_recipe(tmp_path / "recipe.yaml")
    assert dict(loaded.experts) == {"a": "a", "b": "y"}
    with pytest.raises(MergeflowError, match=r"override 'experts=.*is given twice"):
        load_recipe(tmp_path / "recipe.yaml", ["experts={a: x, a: y}"])


def test_all_mismatches_are_listed_at_once(files):
    base, experts = awkward(torch.float32)
    broken = {**experts["expert1"], "bias": torch.zeros(6), "conv2": torch.zeros(1)}
    del broken["logit_scale"]
    write_checkpoint(files / "expert0.safetensors", {key: torch.zeros(3, 3, 3) for key in base})
    write_checkpoint(files / "expert1.safetensors", broken)
    write_checkpoint(files / "expert2.safetensors", {**experts["expert2"], "bias": torch.zeros(5, dtype=torch.int8)})
    with pytest.raises(MergeflowError) as caught:
        merge(recipe(files))
    text = str(caught.value)
    assert f"{4 + len(base)} mismatches" in text
    assert text.count("shape [3, 3, 3], base has") == len(base)
    assert "'expert1' lacks tensor 'logit_scale'" in text
    assert "'expert1' has tensor 'bias' of shape [6], base has [5]" in text
    assert "'expert1' has tensor 'conv2', unknown to the base; the base's nearest is 'conv'" in text
    assert "'expert2' has tensor 'bias' of torch.int8, base has torch.float32" in text


def test_a_mismatch_of_few_tensors_names_what_leaves_them_out(files):
    """As a classifier's head, which the pre-trained base does not have."""
    _, experts = awkward(torch.float32)
    headed = {**experts["expert1"], "classifier.bias": torch.ones(2), "classifier.weight": torch.ones(2, 3)}
    del headed["logit_scale"]
    write_checkpoint(files / "expert1.safetensors", headed)
    with pytest.raises(
        MergeflowError, match=r"`ignore: \['classifier\.bias', 'classifier\.weight'\]`.*`missing: base`"
    ):
        merge(recipe(files))
    with open_checkpoint(
        merge(recipe(files, ignore=["classifier.bias", "classifier.weight"], missing="base")).path
    ) as made:
        assert not [name for name in made if "classifier" in name]


def test_experts_may_have_other_types_than_the_base(files):
    _, experts = awkward(torch.float16)
    write_checkpoint(files / "expert1.safetensors", experts["expert1"])
    first = merge(recipe(files, dtype="float32"))
    assert "types differ from the base's ('expert1' float16)" in "\n".join(check_recipe(recipe(files)).lines())
    with open_checkpoint(first.path) as state:
        assert state.infos["bias"].dtype.torch == torch.float32
    assert merge(recipe(files)).fingerprint == first.fingerprint


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "cart", "dare"])
def test_nan_and_inf_name_expert_and_tensor(files, value, method):
    _, experts = awkward(torch.float32)
    experts["expert1"]["blocks.1.mlp.weight"][3, 2] = value
    write_checkpoint(files / "expert1.safetensors", experts["expert1"])
    with pytest.raises(MergeflowError, match=r"'expert1' holds NaN or infinity in tensor 'blocks\.1\.mlp\.weight'"):
        merge(recipe(files, method=method))
    assert not (files / "out.safetensors").exists()
    base, _ = awkward(torch.float32)
    with pytest.raises(MergeflowError, match="'expert1' holds NaN"):
        prepare(configure(method), base, experts)


@pytest.mark.parametrize("method", ["average", "task_arithmetic", "ties", "cart", "dare", "slerp", "model_stock"])
def test_infinities_that_all_models_share_stay(tmp_path, method):
    """Bounds and masks that a class keeps beside its weights, as Gemma 4 keeps those of what its layers take."""
    base, experts = awkward(torch.float32)
    experts = fitting(method, experts)
    mask = torch.zeros(6, 6).masked_fill_(torch.ones(6, 6).triu(1).bool(), -float("inf"))
    states = {"base": base, **experts}
    for state in states.values():
        state |= {"input_max": torch.tensor(0.0), "layers.0.attn.mask": torch.zeros(6, 6)}
    plain = {name: value.clone() for name, value in prepare(configure(method), base, experts).at(0.7).items()}
    for name, state in states.items():
        state |= {"input_max": torch.tensor(float("inf")), "layers.0.attn.mask": mask.clone()}
        write_checkpoint(tmp_path / f"{name}.safetensors", state)
    files = {name: str(tmp_path / f"{name}.safetensors") for name in experts}
    scaled = {"args": {"scale": 0.7}, "base": str(tmp_path / "base.safetensors")}
    made = merge({"method": method, "experts": files, **scaled, "out": str(tmp_path / "out.safetensors")})
    in_memory = prepare(configure(method), base, experts).at(0.7)
    with open_checkpoint(made.path) as checkpoint:
        for name in checkpoint:
            wanted = base[name] if name in ("input_max", "layers.0.attn.mask") else plain[name]
            assert torch.equal(checkpoint[name], wanted), name
            assert torch.equal(in_memory[name], wanted), name
    experts[min(experts)]["layers.0.attn.mask"][0, 0] = 1.0
    with pytest.raises(MergeflowError, match=r"'base' holds NaN or infinity in tensor 'layers\.0\.attn\.mask'"):
        prepare(configure(method), base, experts)


def test_an_infinity_that_base_and_expert_share_is_the_base_s(files):
    base, experts = awkward(torch.float32)
    for state in (base, experts["expert1"]):
        state["blocks.1.mlp.weight"][3, 2] = float("inf")
    write_checkpoint(files / "base.safetensors", base)
    write_checkpoint(files / "expert1.safetensors", experts["expert1"])
    with pytest.raises(MergeflowError, match=r"'base' holds NaN or infinity in tensor 'blocks\.1\.mlp\.weight'"):
        merge(recipe(files))


def test_finite_values_whose_difference_overflows_are_nobody_s_infinity(files):
    base, experts = awkward(torch.float32)
    base["blocks.1.mlp.weight"][3, 2], experts["expert1"]["blocks.1.mlp.weight"][3, 2] = -3e38, 3e38
    write_checkpoint(files / "base.safetensors", base)
    write_checkpoint(files / "expert1.safetensors", experts["expert1"])
    with pytest.raises(MergeflowError, match=r"tensor 'blocks\.1\.mlp\.weight' of the result overflows"):
        merge(recipe(files))


def test_large_finite_values_are_not_taken_for_infinity():
    base = {"w": torch.full((4,), 3e38)}
    merged = prepare(configure("average"), base, {"a": {"w": torch.full((4,), 3e38)}}).at(1.0)
    assert torch.equal(merged["w"], base["w"])


def test_overflow_of_the_result_type_is_an_error(files):
    with pytest.raises(MergeflowError, match=r"overflows torch\.float16"):
        merge(recipe(files, dtype="float16", args={"scale": 1e6}))
    assert not (files / "out.safetensors").exists()


@pytest.mark.parametrize("name", ["ignored", "bounded"])
def test_overflow_of_what_is_not_merged_is_an_error_and_its_bounds_are_none(tmp_path, name):
    """A tensor that `ignore` keeps, or that holds a bound of infinity, was cast to float16 without a look."""
    state = {"w": torch.ones(2), name: torch.tensor([float("inf"), 1e6])}
    write_checkpoint(tmp_path / "m.safetensors", state)
    place = str(tmp_path / "m.safetensors")
    plan = {"method": "average", "base": place, "experts": {"a": place}, "out": str(tmp_path / "out.safetensors")}
    plan |= {"ignore": [name]} if name == "ignored" else {}
    with pytest.raises(MergeflowError, match=rf"'{name}' of the result overflows torch\.float16"):
        merge({**plan, "dtype": "float16"})
    merge({**plan, "dtype": "bfloat16"})


@pytest.mark.parametrize(
    ("base", "expert", "message"),
    [
        ({"w": torch.full((4,), 6e4).half()}, {"w": torch.full((4,), 6.3e4)}, r"overflows torch\.float16"),
        ({"n.running_var": torch.ones(2)}, {"n.running_var": torch.zeros(2)}, "holds negative variances"),
    ],
)
def test_a_result_in_memory_is_checked_as_one_in_a_file(base, expert, message):
    """`at` gave infinities and negative variances without a word."""
    direction = prepare("task_arithmetic", base, {"a": expert})
    for out in (None, {name: value.clone() for name, value in base.items()}):
        with pytest.raises(MergeflowError, match=message):
            direction.at(2.0, out)
    assert direction.at(2.0, checked=False)
    bound = {"w": torch.tensor([float("-inf"), 0.0])}
    assert torch.equal(prepare("average", bound, {"a": bound}).at(1.0)["w"], bound["w"])


@pytest.mark.parametrize("name", ["base.safetensors", "expert1.safetensors", "link.safetensors", "hard.safetensors"])
def test_an_input_is_never_overwritten(files, name):
    (files / "link.safetensors").symlink_to(files / "expert1.safetensors")
    os.link(files / "expert0.safetensors", files / "hard.safetensors")
    before = fingerprint(open_checkpoint(files / "expert1.safetensors"))
    with pytest.raises(MergeflowError, match="would overwrite the input"):
        merge(recipe(files), out=files / name)
    assert fingerprint(open_checkpoint(files / "expert1.safetensors")) == before


def test_a_file_that_no_merge_made_is_replaced_by_force_alone(files):
    from mergeflow.merging.files import vectors

    out, tau = files / "out.safetensors", files / "tau.safetensors"
    for precious in (b"not a checkpoint", (files / "expert2.safetensors").read_bytes()):
        out.write_bytes(precious)
        tau.write_bytes(precious)
        for run in (
            lambda: check_recipe(recipe(files)),
            lambda: merge(recipe(files)),
            lambda: vectors.extract(files / "base.safetensors", files / "expert0.safetensors", tau),
        ):
            with pytest.raises(MergeflowError, match=r"was not made by a merge.*--force"):
                run()
        assert out.read_bytes() == tau.read_bytes() == precious
    check_recipe(recipe(files), force=True)
    merge(recipe(files), force=True)
    vectors.extract(files / "base.safetensors", files / "expert0.safetensors", tau, force=True)
    first = out.read_bytes()
    merge(recipe(files, args={"scale": 2}))  # what a merge made is replaced, and its card
    vectors.extract(files / "base.safetensors", files / "expert1.safetensors", tau)
    assert out.read_bytes() != first
    with pytest.raises(MergeflowError, match="would overwrite the input"):
        merge(recipe(files, out=str(files / "expert0.safetensors")), force=True)
    (files / "empty.safetensors").touch()
    merge(recipe(files, out=str(files / "empty.safetensors")))
    out.write_bytes(precious)
    card = out.with_suffix(".md")
    card.write_text("my notes")
    for run in (lambda: check_recipe(recipe(files), force=True), lambda: merge(recipe(files), force=True)):
        with pytest.raises(MergeflowError, match=r"model card would overwrite '.*out\.md', which no merge made"):
            run()
    assert (card.read_text(), out.read_bytes()) == ("my notes", precious), "force is for the file that `out` names"


def test_a_task_vector_is_no_base(files):
    from mergeflow.merging.files.vectors import extract

    extract(files / "base.safetensors", files / "expert0.safetensors", files / "tau.safetensors")
    with pytest.raises(MergeflowError, match="is a task vector or an adapter, not a model"):
        check_recipe(recipe(files, base=str(files / "tau.safetensors")))


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        (["*attn.qkv*"], r"method 'cart': the pattern '\*attn\.qkv\*' of `matrices` fits no matrix.*1 × embedding"),
        (["*mlp*", "*.atn.*"], r"the pattern '\*\.atn\.\*'"),
        (["bias"], "the pattern 'bias'"),
        (["head"], "the pattern 'head'"),  # tied: both go by the name 'embedding'
    ],
)
def test_patterns_that_fit_no_matrix_are_refused_before_weights_are_read(files, monkeypatch, matrices, message):
    from mergeflow.checkpoints.reader import FileEntry

    monkeypatch.setattr(FileEntry, "read", lambda *a: pytest.fail("read data"))
    monkeypatch.setattr(FileEntry, "read_into", lambda *a: pytest.fail("read data"))
    for run in (check_recipe, merge):
        with pytest.raises(MergeflowError, match=message):
            run(recipe(files, method="cart", matrices=matrices))
    base, experts = awkward(torch.float32)
    with pytest.raises(MergeflowError, match=message):
        prepare(configure("cart", {"matrices": matrices}), base, experts)
    of_args = {"of": "low_rank", "of_args": {"matrices": matrices}}
    with pytest.raises(MergeflowError, match=message.replace("'cart'", "'lines'")):
        check_recipe(recipe(files, method="lines", args=of_args))


def test_a_preset_that_takes_nothing():
    mixer = {
        "backbone.layers.0.mixer.in_proj.weight": torch.zeros(4, 4),
        "backbone.layers.0.norm.weight": torch.ones(4),
    }
    experts = {"a": {name: value + 1 for name, value in mixer.items()}}
    with pytest.raises(MergeflowError, match=r"attn_mlp` takes none.*1 × backbone\.layers\.\*\.mixer.*`matrices: all`"):
        prepare(configure("cart"), mixer, experts)
    prepare(configure("cart", {"matrices": "all"}), mixer, experts)
    bias = {"bias": torch.zeros(4)}
    prepare(configure("cart"), bias, {"a": {"bias": torch.ones(4)}})


@pytest.mark.parametrize(
    ("method", "args", "count"),
    [("cart", {}, 4), ("cart", {"matrices": "all"}, 4), ("cart", {"matrices": ["*.1.mlp*"]}, 1), ("ties", {}, 0)],
)
def test_the_plan_counts_the_matrices_that_are_treated(files, method, args, count):
    plan = check_recipe(recipe(files, method=method, args=args))
    assert plan.treatment.count == count
    assert ("treated as matrices" in plan.lines()[2]) == (method == "cart")


def test_statistics_are_checked_before_weights_are_read(files):
    base, experts = awkward(torch.float32)
    data = statistics(base, experts)
    paths = {kind: {name: str(files / f"{kind}-{name}.safetensors") for name in experts} for kind in data}

    def write(kind, name, **changes):
        state = {**data[kind][name], **changes}
        write_checkpoint(paths[kind][name], {key: value for key, value in state.items() if value is not None})

    for kind in data:
        for name in experts:
            write(kind, name)
    for kind, method in (("fisher", "fisher"), ("gram", "regmean")):
        check_recipe(recipe(files, method=method, data={kind: paths[kind]}))
    write("fisher", "expert0", conv=torch.ones(3), bias=None)
    write("gram", "expert1", **{"blocks.0.mlp.weight": torch.ones(6, 6)})
    with pytest.raises(MergeflowError) as caught:
        check_recipe(recipe(files, method="fisher", data={"fisher": paths["fisher"]}))
    assert "2 statistics do not fit" in str(caught.value)
    assert "fisher of 'expert0', tensor 'conv': shape [3], expected [4, 3, 2, 2]" in str(caught.value)
    assert "fisher of 'expert0', tensor 'bias': missing" in str(caught.value)
    with pytest.raises(MergeflowError, match=r"tensor 'blocks\.0\.mlp\.weight': shape \[6, 6\], expected \[10, 10\]"):
        check_recipe(recipe(files, method="regmean", data={"gram": paths["gram"]}))
    write("fisher", "expert0", bias=torch.full((5,), float("nan")))
    with pytest.raises(MergeflowError, match="'fisher of expert0' holds NaN or infinity in tensor 'bias'"):
        merge(recipe(files, method="fisher", data={"fisher": paths["fisher"]}))
    with pytest.raises(MergeflowError, match="would overwrite the input 'fisher of expert1'"):
        merge(recipe(files, method="fisher", data={"fisher": paths["fisher"]}), out=paths["fisher"]["expert1"])


def test_check_refuses_every_out_that_merge_would(files):
    (files / "note.txt").write_text("")
    (files / "card.md").write_text("# Notes of a year")
    (files / ".link.partial").symlink_to(files)
    os.mkfifo(files / "pipe")  # as /dev/null is, which a merge by root replaced
    os.mkfifo(files / "pipe.safetensors")
    (files / "full").mkdir()
    (files / "full" / "thesis.txt").write_text("years of work")
    before = {path: path.read_bytes() for path in files.rglob("*") if path.is_file()}
    outs = {
        "base.safetensors": "would overwrite the input",
        ".": "would overwrite the input",
        "out.pt": "results are safetensors",
        "note.txt": "is a file",
        "link": "is a file or a link",
        **dict.fromkeys(("pipe", "pipe.safetensors"), "is a device, a pipe or a socket"),
        "card.safetensors": r"card would overwrite '.*card\.md'",
        "full": "was not made by a merge",
        **dict.fromkeys(("note.txt/a.safetensors", "x" * 300 + ".safetensors"), "cannot write"),
    }
    for out, message in outs.items():
        messages = []
        for run in (check_recipe, merge):
            with pytest.raises(MergeflowError, match=message) as caught:
                run(recipe(files, out=str(files / out)))
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
    with pytest.raises(MergeflowError, match="no output"):
        merge(recipe(files, out=None))
    with pytest.raises(MergeflowError, match="makes a folder"):
        check_recipe(recipe(files, shard_size="1MB"))
    with pytest.raises(MergeflowError, match="cannot read checkpoint"):
        check_recipe(recipe(files, base="x" * 5000))
    assert {path: path.read_bytes() for path in files.rglob("*") if path.is_file()} == before
    assert "to " + str(files / "out.safetensors") in check_recipe(recipe(files)).lines()[4]
    assert "give it with `merge --out`" in check_recipe(recipe(files, out=None)).lines()[4]


def test_a_folder_that_may_not_be_written(files, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(MergeflowError, match="may not be written"):
        check_recipe(recipe(files))


def test_a_recipe_is_a_record_a_mapping_or_a_path(files):
    values = recipe(files).model_dump()
    (files / "r.json").write_text(json.dumps(values))
    made = {merge(given).fingerprint for given in (recipe(files), values, files / "r.json", str(files / "r.json"))}
    assert len(made) == 1
    assert check_recipe(values) == check_recipe(str(files / "r.json"))
    for run in (merge, check_recipe, make_recipe):
        for wrong in (None, 3, [values]):
            with pytest.raises(MergeflowError, match="expected a mapping with keys such as method and base, found"):
                run(wrong)


def test_wrong_kinds_of_arguments_in_memory():
    base, experts = awkward(torch.float32)
    with pytest.raises(MergeflowError, match=r"takes a method's name, or `configure.*found 3"):
        prepare(3, base, experts)
    with pytest.raises(MergeflowError, match="unknown argument of average 'keep'"):
        prepare("average", base, experts, keep=0.2)
    with pytest.raises(MergeflowError, match=r"arguments \['scale'\] are given in addition to a configured method"):
        prepare(configure("average"), base, experts, scale=0.2)
    with pytest.raises(MergeflowError, match="experts are a mapping of names to state dicts, found a list"):
        prepare(configure("average"), base, list(experts.values()))
    for name in (None, 3, ["ties"]):
        with pytest.raises(MergeflowError, match="unknown method"):
            configure(name)
    with pytest.raises(MergeflowError, match="arguments are a mapping"):
        configure("ties", [1])


def test_all_missing_files_are_named(files):
    for name in ("base", "expert0", "expert2"):
        (files / f"{name}.safetensors").unlink()
    with pytest.raises(MergeflowError) as caught:
        check_recipe(recipe(files))
    assert [line.split("'")[1] for line in str(caught.value).splitlines()] == [
        str(files / f"{name}.safetensors") for name in ("base", "expert0", "expert2")
    ]


def test_references_need_a_project(files):
    with pytest.raises(MergeflowError, match="resolved in a project folder"):
        check_recipe(recipe(files, experts=["models:/best@champion"]))
    plan = check_recipe(
        recipe(files, experts=["models:/best@champion"]),
        resolve=lambda path: str(files / "expert0.safetensors") if path.startswith("models:") else path,
    )
    assert plan.experts == ("best@champion",)


def test_the_version_that_an_alias_meant_is_recorded(files, monkeypatch):
    monkeypatch.chdir(files)  # what is stored names inputs by their place here
    meant = {"models:/best@champion": "models:/best/7", "models:/best/7": str(files / "expert0.safetensors")}
    aliased = recipe(files, experts=["models:/best@champion"])
    merged = merge(aliased, resolve=lambda path: meant.get(path, path))
    with open_checkpoint(merged.path) as state:
        recorded = json.loads(state.metadata["mergeflow.recipe"])
    assert recorded["experts"] == {"best@champion": "models:/best/7"}
    assert "models:/best/7" in merged.path.with_suffix(".md").read_text()
    meant["models:/best@champion"] = "models:/best/8"
    again = merge(make_recipe(recorded), files / "again.safetensors", resolve=lambda path: meant.get(path, path))
    assert again.fingerprint == merged.fingerprint
    assert check_recipe(
        aliased, resolve=lambda path: {**meant, "models:/best/8": meant["models:/best/7"]}.get(path, path)
    )


def test_a_full_disk_is_one_error(files, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MergeflowError, match="No space left on device"):
        merge(recipe(files))
    assert not [path for path in files.iterdir() if path.name.startswith(("out", ".out"))]


def test_cuda_without_a_device(files):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    base, experts = awkward(torch.float32)
    for run in (
        lambda: merge(recipe(files, device="cuda")),
        lambda: check_recipe(recipe(files, device="cuda:1")),
        lambda: prepare(configure("ties"), base, experts, device="cuda"),
    ):
        with pytest.raises(MergeflowError, match="no CUDA device"):
            run()


def test_check_reads_headers_only(files, monkeypatch):
    from mergeflow.checkpoints.reader import FileEntry

    monkeypatch.setattr(FileEntry, "read", lambda *a: pytest.fail("read data"))
    monkeypatch.setattr(FileEntry, "read_into", lambda *a: pytest.fail("read data"))
    plan = check_recipe(recipe(files, method="ties"))
    assert plan.passes == 2
    assert plan.tensors == 13
    assert len(plan.lines()) == 6


def test_a_folder_of_ours_is_replaced_and_companions_are_copied(files):
    (files / "hf").mkdir()
    os.rename(files / "base.safetensors", files / "hf" / "model.safetensors")
    (files / "hf" / "config.json").write_text("{}")
    (files / "hf" / "tokenizer.json").write_text("{}")
    (files / "hf" / "training.log").write_text("")
    for scale in (0.5, 1.0):
        result = merge(recipe(files, base=str(files / "hf"), args={"scale": scale}), out=files / "out")
    names = {path.name for path in (files / "out").iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json", "mergeflow.json", "README.md"}
    record = json.loads((files / "out" / "mergeflow.json").read_text())
    assert record["recipe"]["args"]["scale"] == 1.0
    assert record["fingerprint"] == result.fingerprint


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_the_configuration_says_the_result_s_type(files, key):
    (files / "hf").mkdir()
    os.rename(files / "base.safetensors", files / "hf" / "model.safetensors")
    config = {"b": 1e-05, key: "float32", "auto_map": {"AutoModel": "modeling_x.X", "AutoTokenizer": ["a--b.C", None]}}
    (files / "hf" / "config.json").write_text(json.dumps(config))
    copied = {"tokenizer.model.v3", "vocab.bpe", "merges.txt", "LICENSE", "LICENSE.md", "modeling_x.py", "config.json"}
    for name in (copied | {"train.py", "b.py", "old.model.pt"}) - {"config.json"}:
        (files / "hf" / name).write_text(name)
    changes = {"base": str(files / "hf"), "out": str(files / "out")}
    merge(recipe(files, **changes))
    assert (files / "out" / "config.json").read_text() == json.dumps(config)
    merge(recipe(files, **changes, dtype="float16"))
    written = json.loads((files / "out" / "config.json").read_text())
    assert written == {**config, key: "float16"}
    assert list(written) == list(config)
    names = {path.name for path in (files / "out").iterdir()}
    licences = {"LICENSE", "LICENSE.md"}  # said to be the base's, for experts may have others
    named = {"LICENSE-base", "LICENSE-base.md"}
    assert names == (copied - licences) | named | {"model.safetensors", "mergeflow.json", "README.md"}


def test_the_result_carries_what_makes_it_again(files, monkeypatch):
    monkeypatch.chdir(files)  # what is stored names inputs by their place here
    result = merge(recipe(files, method="dare", args={"seed": 3}))
    with open_checkpoint(result.path) as state:
        notes = state.metadata
        assert notes["mergeflow.fingerprint"] == result.fingerprint == fingerprint(state)
    assert json.loads(notes["mergeflow.inputs"]) == result.inputs
    assert result.inputs["base"] == fingerprint(open_checkpoint(files / "base.safetensors"))
    again = make_recipe(json.loads(notes["mergeflow.recipe"]))
    assert merge(again, out=files / "again.safetensors").fingerprint == result.fingerprint
    card = result.path.with_suffix(".md").read_text()
    assert result.fingerprint in card
    assert "Super Mario" in card


def test_progress_ends_at_all_of_it(files):
    seen = []
    merge(recipe(files, method="ties"), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] > 0
    assert all(0 < done <= total for done, total in seen)
    assert seen == sorted(seen)


def test_statistics_of_batch_norm_are_told_of_and_never_become_negative(tmp_path):
    """Experts on narrower data: 1 + (0.3 − 1) + (0.2 − 1) = −0.5, and the model would give NaN without a word."""
    transformers = pytest.importorskip("transformers")
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes)).eval()
    for name, share in (("base", 1.0), ("a", 0.3), ("b", 0.2)):
        for key, value in model.named_buffers():
            if key.endswith("running_var"):
                value.fill_(share)
        model.save_pretrained(tmp_path / name)
    paths = {"base": str(tmp_path / "base"), "experts": [str(tmp_path / name) for name in "ab"]}
    given = {"method": "task_arithmetic", "args": {"scale": 1.0}, **paths, "out": str(tmp_path / "out")}
    (warning,) = [line for line in check_recipe(given).lines() if line.startswith("warning")]
    assert "tensors such as" in warning
    assert "compute them again from data" in warning
    with pytest.raises(
        MergeflowError, match=r"running_var' of the result holds negative variances.*`ignore: \['\*runn"
    ):
        merge(given)
    assert not (tmp_path / "out").exists()
    merge({**given, "args": {"scale": 0.5}})
    made = merge({**given, "ignore": ["*running_mean", "*running_var"]})
    assert made.warnings == ("the experts 'a', 'b' are the same, which counts as often as it is named",)
    loaded = transformers.ResNetForImageClassification.from_pretrained(made.path).eval()
    assert loaded(torch.randn(1, 3, 32, 32)).logits.isfinite().all()
    with pytest.raises(MergeflowError, match=r"takes none of the matrices.*convolutions are not matrices here: ties"):
        check_recipe({**given, "method": "cart", "args": {}})


def test_what_a_folder_s_own_files_name_comes_along(files):
    for folder in ("hf", "e"):
        (files / folder / "1_Pooling").mkdir(parents=True)
        (files / folder / "2_Dense").mkdir()
        modules = [{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}, {"idx": 2, "path": "2_Dense"}]
        (files / folder / "modules.json").write_text(json.dumps(modules))
        (files / folder / "1_Pooling/config.json").write_text("{}")
        (files / folder / "2_Dense/model.safetensors").write_text(folder)
        shutil.copy(files / "base.safetensors", files / folder / "model.safetensors")
        (files / folder / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling_x.X"}}))
        (files / folder / "modeling_x.py").write_text("from .layers import A\n    from . import config_x\n")
        for name in ("value_head.safetensors", "model.fp16.safetensors", "optimizer.pt", "pytorch_model_fsdp.bin"):
            (files / folder / name).write_text(folder)
    (files / "hf/onnx").mkdir()  # named by nothing
    (files / "e/layers.py").write_text("import sys\n")
    (files / "hf/layers.py").write_text("import os\n")
    (files / "hf/config_x.py").write_text("")
    given = recipe(files, base=str(files / "hf"), experts={"e": str(files / "e")})
    warnings = [line.removeprefix("warning").strip() for line in check_recipe(given).lines() if "warning" in line]
    assert warnings == [
        "modules: 'e' has another '2_Dense/model.safetensors'; the result has the base's",
        "code: 'e' has another 'layers.py'; the result has the base's",
        "files: 'value_head.safetensors' of 'base', 'e' is no part of the model: its weights are not merged or copied",
    ]
    merge(given, out=files / "out")
    names = {str(path.relative_to(files / "out")) for path in (files / "out").rglob("*")}
    assert names >= {"1_Pooling/config.json", "2_Dense/model.safetensors", "modeling_x.py", "layers.py", "config_x.py"}
    assert "onnx" not in names
