"""The commands of the library, as a shell runs them."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner, Result

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.cli import add_all_commands, app
from mergeflow.commands import derived, merging
from mergeflow.errors import MergeflowError

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    app = Typer(pretty_exceptions_enable=False)
    merging.add_commands(app)
    derived.add_commands(app)

    def invoke(*words: str | Path, resolve: Callable[[str], str] | None = None) -> Result:
        result = CliRunner().invoke(app, [str(word) for word in words], obj=resolve)
        if isinstance(result.exception, MergeflowError):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base of one matrix and one vector, two experts, a recipe."""
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    base = {"attn.weight": torch.randn(6, 4, generator=generator), "bias": torch.zeros(4)}
    write_checkpoint(tmp_path / "base.safetensors", base)
    for name in ("a", "b"):
        expert = {key: value + torch.randn(value.shape, generator=generator) for key, value in base.items()}
        write_checkpoint(tmp_path / f"{name}.safetensors", expert)
    (tmp_path / "recipe.yaml").write_text(
        "method: task_arithmetic\nargs: {scale: 0.5}\nbase: base.safetensors\n"
        "experts: {a: a.safetensors, b: b.safetensors}\nout: merged.safetensors\n"
    )
    return tmp_path


def tensors(path: Path) -> dict[str, torch.Tensor]:
    with open_checkpoint(path) as state:
        return {name: state[name].clone() for name in state}


def test_check_and_merge_say_alike_how_inputs_were_made_to_fit(run: Run, folder: Path) -> None:
    state = {f"encoder.{name}": value for name, value in tensors(folder / "a.safetensors").items()}
    write_checkpoint(folder / "a.safetensors", state)
    (folder / "recipe.yaml").write_text((folder / "recipe.yaml").read_text().replace("b: b.saf", "b: a.saf"))
    said = [
        [line for line in run(command, "recipe.yaml").output.splitlines() if line.startswith(("note ", "warning "))]
        for command in ("check", "merge")
    ]
    assert said[0] == said[1]
    assert [line.split()[0] for line in said[0]] == ["note", "note", "warning"]


def test_merge_with_a_changed_scale(run: Run, folder: Path) -> None:
    result = run("merge", "recipe.yaml", "--set", "args.scale=1.0")
    assert result.exit_code == 0, result.output
    base, a, b, merged = (tensors(folder / f"{name}.safetensors") for name in ("base", "a", "b", "merged"))
    expected = base["bias"] + (a["bias"] - base["bias"]) + (b["bias"] - base["bias"])
    torch.testing.assert_close(merged["bias"], expected)


def test_merge_says_where_the_result_is_whatever_its_name(run: Run, folder: Path) -> None:
    for name in ("run[/2].safetensors", "mödel [x] dir/out.safetensors"):
        result = run("merge", "recipe.yaml", "--out", name)
        assert (result.exit_code, (folder / name).exists()) == (0, True)
        assert name in "".join(result.output.splitlines())


def test_merge_warns_of_what_check_warns_of(run: Run, folder: Path) -> None:
    for name, licence in (("base", "apache-2.0"), ("a", "cc-by-nc-4.0"), ("b", "apache-2.0")):
        (folder / name).mkdir()
        (folder / f"{name}.safetensors").rename(folder / name / "model.safetensors")
        (folder / name / "README.md").write_text(f"---\nlicense: {licence}\n---\n")
    (folder / "recipe.yaml").write_text(
        "method: task_arithmetic\nbase: base\nexperts: {a: a, b: b}\nout: merged.safetensors\n"
    )
    warned = [line for line in run("check", "recipe.yaml").output.splitlines() if line.startswith("warning")]
    assert "licences" in warned[0]
    assert set(warned) <= set(run("merge", "recipe.yaml").output.splitlines())


def test_check_writes_nothing(run: Run, folder: Path) -> None:
    result = run("check", "recipe.yaml")
    assert "task_arithmetic (scale 0.5, normalize False)" in result.output
    assert not (folder / "merged.safetensors").exists()


def test_a_wrong_argument_is_one_message(run: Run, folder: Path) -> None:
    with pytest.raises(MergeflowError, match="did you mean 'scale'"):
        run("merge", "recipe.yaml", "--set", "args.scle=1")


def test_methods_lists_all_and_explains_one(run: Run) -> None:
    listed = run("methods").output
    for name in ("ties", "cart", "tsv", "emr", "adamerging"):
        assert name in listed
    assert "Yadav" in run("methods", "ties").output


def test_diff_tells_by_its_status(run: Run, folder: Path) -> None:
    assert run("diff", "a.safetensors", "a.safetensors").exit_code == 0
    different = run("diff", "a.safetensors", "b.safetensors")
    assert different.exit_code == 1
    assert "attn.weight" in different.output


def test_diff_shows_a_change_of_type_and_shape_under_the_name(run: Run, folder: Path) -> None:
    base = tensors(folder / "base.safetensors")
    changed = {"attn.weight": base["attn.weight"].T.contiguous(), "bias": base["bias"].half()}
    write_checkpoint(folder / "changed.safetensors", changed)
    lines = [line.strip() for line in run("diff", "base.safetensors", "changed.safetensors").output.splitlines()]
    assert "[6, 4] → [4, 6]" in lines
    assert "float32 → float16" in lines
    assert "nan" not in "".join(lines)
    assert "→" not in run("diff", "a.safetensors", "b.safetensors").output


def test_references_stand_wherever_checkpoints_stand(run: Run, folder: Path) -> None:
    def resolve(path: str) -> str:
        return path if not path.startswith("models:/") else f"{path[8:]}.safetensors"

    for words in (
        "vector extract models:/base models:/a --out tau.safetensors",
        "vector add models:/tau models:/tau --out x.safetensors",
        "vector negate models:/tau --out x.safetensors",
        "vector scale models:/tau -2 --out x.safetensors",
        "vector analogy models:/tau models:/tau models:/tau --out x.safetensors",
        "compress emr --base models:/base --expert a=models:/a --out suite.safetensors",
        "extract-task models:/suite a --base models:/base --out x.safetensors",
        "diff models:/a models:/a",
    ):
        assert run(*words.split(), resolve=resolve).exit_code == 0
        with pytest.raises(MergeflowError, match=r"'models:/\w+' is not a local path\. References .* in a project"):
            run(*words.split())
    with pytest.raises(MergeflowError, match="would overwrite the input"):
        run("vector", "negate", "models:/tau", "--out", "tau.safetensors", resolve=resolve)


def test_vector_arithmetic_round_trip(run: Run, folder: Path) -> None:
    for name in ("a", "b"):
        run("vector", "extract", "base.safetensors", f"{name}.safetensors", "--out", f"v{name}.safetensors")
    run("vector", "negate", "va.safetensors", "--out", "n.safetensors")
    run("vector", "add", "va.safetensors", "n.safetensors", "--out", "zero.safetensors")
    assert all((value == 0).all() for value in tensors(folder / "zero.safetensors").values())
    run("vector", "scale", "va.safetensors", "2.0", "--out", "twice.safetensors")
    run("vector", "add", "va.safetensors", "--weight", "2.0", "--out", "also.safetensors")
    assert run("diff", "twice.safetensors", "also.safetensors").exit_code == 0
    run("vector", "analogy", "va.safetensors", "vb.safetensors", "va.safetensors", "--out", "c.safetensors")
    torch.testing.assert_close(tensors(folder / "c.safetensors"), tensors(folder / "vb.safetensors"))


def test_negative_factors_are_no_options(run: Run, folder: Path) -> None:
    run("vector", "extract", "base.safetensors", "a.safetensors", "--out", "v.safetensors")
    tau = tensors(folder / "v.safetensors")["bias"]
    for words in (
        ("v.safetensors", "-0.5", "--out", "x.safetensors"),
        ("--out", "x.safetensors", "v.safetensors", "-5e-1"),
        ("v.safetensors", "--out", "x.safetensors", "--", "-.5"),
    ):
        assert run("vector", "scale", *words).exit_code == 0
        assert torch.equal(tensors(folder / "x.safetensors")["bias"], tau * -0.5)
    run("vector", "add", "v.safetensors", "v.safetensors", "--weight", "-1", "--weight=-2", "--out", "y.safetensors")
    torch.testing.assert_close(tensors(folder / "y.safetensors")["bias"], tau * -3)
    for wrong in (("-0.5", "--uot", "z.safetensors"), ("-inf", "--out", "z.safetensors"), ("--out", "z.safetensors")):
        with pytest.raises(MergeflowError, match="finite") if "-inf" in wrong else nullcontext():
            assert run("vector", "scale", "v.safetensors", *wrong).exit_code == 2
    assert not (folder / "z.safetensors").exists()


def test_compress_and_extract_one_task(run: Run, folder: Path) -> None:
    experts = ["--expert", "a=a.safetensors", "--expert", "b=b.safetensors"]
    made = run("compress", "cart_indexing", "--base", "base.safetensors", *experts, "--out", "small.safetensors")
    assert made.exit_code == 0, made.output
    counted = "integers: 'steps' of 'b' differs from the base's"
    assert counted not in made.output
    for name, steps in (("base", 1), ("a", 1), ("b", 2)):
        write_checkpoint(
            folder / f"{name}.safetensors", {**tensors(folder / f"{name}.safetensors"), "steps": torch.tensor(steps)}
        )
    made = run(
        "compress", "cart_indexing", "--base", "base.safetensors", *experts, "--out", "small.safetensors", "--force"
    )
    assert counted in made.output
    taken = run("extract-task", "small.safetensors", "a", "--out", "again.safetensors")
    assert taken.exit_code == 0, taken.output
    assert tensors(folder / "again.safetensors").keys() == tensors(folder / "a.safetensors").keys()
    with pytest.raises(MergeflowError, match="NAME=VALUE"):
        run("compress", "emr", "--base", "base.safetensors", "--expert", "a", "--out", "x.safetensors")
    with pytest.raises(MergeflowError, match=r"--set 'rank_ratio=\[0.1' is not valid YAML"):
        run("compress", "cart_indexing", "--base", "base.safetensors", *experts, "--out", "x.safetensors",
            "--set", "rank_ratio=[0.1")  # fmt: skip


def test_compress_warns_where_statistics_of_batchnorm_are_averaged(run: Run, folder: Path) -> None:
    for name in ("base", "a", "b"):
        running = {"bn.running_mean": torch.zeros(3), "bn.running_var": torch.ones(3)}
        write_checkpoint(folder / f"{name}.safetensors", tensors(folder / f"{name}.safetensors") | running)
    experts = ["--base", "base.safetensors", "--expert", "a=a.safetensors", "--expert", "b=b.safetensors", "--force"]
    apart = ("--set", "non_matrices=own")
    for warned, arguments in (
        (True, ("cart_indexing",)),
        (True, ("tsv_compress",)),
        (False, ("cart_indexing", *apart)),
        (False, ("tsv_compress", *apart)),
        (False, ("emr",)),
        (False, ("tall_mask",)),
    ):
        made = run("compress", *arguments, *experts, "--out", "small.safetensors")
        assert ("2 tensors such as 'bn.running_mean' are merged like weights" in made.output) == warned, arguments


def test_compression_overwrites_no_input(run: Run, folder: Path) -> None:
    experts = ["--base", "base.safetensors", "--expert", "a=a.safetensors", "--expert", "b=b.safetensors"]
    assert run("compress", "emr", *experts, "--out", "small.safetensors").exit_code == 0
    os.link("b.safetensors", "hard.safetensors")
    os.symlink("small.safetensors", "link.safetensors")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for out in ("base", "a", "b", "hard"):
        with pytest.raises(MergeflowError, match="would overwrite the input"):
            run("compress", "emr", *experts, "--out", f"{out}.safetensors")
    for out in ("base", "small", "link"):
        with pytest.raises(MergeflowError, match="would overwrite the input"):
            run("extract-task", "small.safetensors", "a", *experts[:2], "--out", f"{out}.safetensors")
    with pytest.raises(MergeflowError, match=r"out 'q\.txt': the result is one file, end it in \.safetensors"):
        run("compress", "emr", *experts, "--out", "q.txt")
    with pytest.raises(MergeflowError, match=r"out 'q\.txt': the result is one file, end it in \.safetensors"):
        run("extract-task", "small.safetensors", "a", *experts[:2], "--out", "q.txt")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_task_vector_is_no_base_of_a_suite(run: Run, folder: Path) -> None:
    run("vector", "extract", "base.safetensors", "a.safetensors", "--out", "va.safetensors")
    with pytest.raises(MergeflowError, match="is a task vector or an adapter, not a model"):
        run("compress", "emr", "--base", "va.safetensors", "--expert", "b=b.safetensors", "--out", "x.safetensors")


def test_a_configuration_of_mergekit_becomes_a_recipe_that_merges(run: Run, folder: Path) -> None:
    (folder / "kit.yml").write_text(
        "merge_method: dare_ties\nbase_model: base.safetensors\nparameters: {density: 1.0, weight: 0.5}\n"
        "models: [{model: a.safetensors}, {model: b.safetensors, parameters: {density: 0.9}}]\n"
    )
    result = run("convert", "kit.yml", "--out", "kit.yaml")
    assert result.exit_code == 0, result.output
    assert "note: masks are drawn by another generator" in result.output
    assert (folder / "kit.yaml").read_text().startswith("# From kit.yml, a configuration of mergekit.\n# masks")
    assert run("merge", "kit.yaml", "--out", "kit.safetensors").exit_code == 0
    with pytest.raises(MergeflowError, match=r"'kit.yaml' exists: choose another name, or give --force"):
        run("convert", "kit.yml", "--out", "kit.yaml")
    assert run("convert", "kit.yml", "--out", "kit.yaml", "--force", "--dtype", "float64").exit_code == 0
    assert "dtype: float64" in (folder / "kit.yaml").read_text()
    with pytest.raises(MergeflowError, match=r"end its name in .yaml"):
        run("convert", "kit.yml", "--out", "kit.txt")
    with pytest.raises(MergeflowError, match=r"'recipe.yaml' is not a configuration of mergekit: it has no merge_me"):
        run("convert", "recipe.yaml", "--out", "other.yaml")
    with pytest.raises(MergeflowError, match=r"dtype: .*int8"):
        run("convert", "kit.yml", "--out", "other.yaml", "--dtype", "int8")
    assert not (folder / "other.yaml").exists()


def test_a_configuration_given_as_recipe_is_told_the_command(run: Run, folder: Path) -> None:
    (folder / "kit.yml").write_text("merge_method: slerp\nbase_model: a\nmodels: []\n")
    with pytest.raises(MergeflowError, match=r"kit.yml: this is a configuration of mergekit.*`mergeflow convert"):
        run("merge", "kit.yml")


def test_layers_and_several_documents_on_the_command_line(run: Run, folder: Path) -> None:
    (folder / "kit.yml").write_text(
        "name: first\nmerge_method: linear\nmodels: [{model: a.safetensors}, {model: b.safetensors}]\n---\n"
        "merge_method: slerp\nbase_model: first\nmodels: [{model: b.safetensors}]\nparameters: {t: 0.5}\n"
    )
    with pytest.raises(MergeflowError, match=r"several documents, the second from line 4 on.*`mergeflow convert`"):
        run("merge", "kit.yml")
    assert run("convert", "kit.yml", "--out", "kit.yaml").exit_code == 0
    checked = run("check", "kit.yaml").output
    assert "step          first: average of 2 experts, written first" in checked or "computed as it is read" in checked
    assert run("merge", "kit.yaml", "--out", "kit.safetensors").exit_code == 0
    (folder / "tall.yaml").write_text("slices: [{model: a.safetensors, layers: [0, 2]}]\n")
    with pytest.raises(MergeflowError, match=r"step 'slices': 'a.safetensors' \(no config.json with a model_type\)"):
        run("check", "tall.yaml")


def test_commands_say_what_they_leave_out(run: Run, folder: Path) -> None:
    """Moving averages beside the weights, and names made to fit, were told by merges alone."""
    state = tensors(folder / "a.safetensors")
    averaged = {name: value + 1 for name, value in state.items()}
    torch.save({"state_dict": {f"model.{name}": v for name, v in state.items()}, "ema": averaged}, folder / "a.pt")
    unread, taken = "'state_dict', which is read, and 'ema', not read", "'expert' are taken without their prefix"
    assert unread in run("convert", "a.pt", "--out", "plain.safetensors").output
    assert unread in run("diff", "a.pt", "a.safetensors").output
    made = run("vector", "extract", "base.safetensors", "a.pt", "--out", "vector.safetensors").output
    assert unread in made
    assert taken in made
    lora = ("extract-lora", "base.safetensors", "a.pt", "--rank", "2", "--out", "lora", "--ignore", "bias")
    assert unread in run(*lora).output
    suite = ("compress", "emr", "--base", "base.safetensors", "--expert", "a=a.pt", "--out", "suite.safetensors")
    compressed = run(*suite).output
    assert unread in compressed
    assert taken.replace("expert", "a") in compressed


def test_vectors_and_suites_of_models_with_other_settings_say_so(run: Run, folder: Path) -> None:
    for name, theta in (("base", 10000.0), ("a", 500000.0)):
        (folder / name).mkdir()
        write_checkpoint(folder / name / "model.safetensors", tensors(folder / f"{name}.safetensors"))
        settings = {"model_type": "llama", "hidden_size": 4, "rope_theta": theta}
        (folder / name / "config.json").write_text(json.dumps(settings))
    suite = ("compress", "emr", "--base", "base", "--expert", "a=a", "--out", "suite.safetensors")
    for arguments in (("vector", "extract", "base", "a", "--out", "vector.safetensors"), suite):
        assert "warning       rope_theta: base 10000.0; " in run(*arguments).output


@pytest.mark.parametrize("place", ["~", "~nobody-here"])
def test_a_path_may_begin_with_a_tilde(folder: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Shells put the home folder where a word begins, but not in `--out=~/x`; `~nobody` is a name like any other."""
    monkeypatch.setenv("HOME", str(folder / "home"))
    real = folder / {"~": "home"}.get(place, place)
    real.mkdir()
    shutil.copy("a.safetensors", real)
    add_all_commands(folder)
    for words in (
        f"vector extract base.safetensors {place}/a.safetensors --out={place}/v.safetensors",
        f"vector add {place}/v.safetensors {place}/v.safetensors --out={place}/sum.safetensors",
        f"merge recipe.yaml --out={place}/merged",
        f"compress emr --base=base.safetensors --expert=a={place}/a.safetensors --out={place}/s.safetensors",
        f"extract-task {place}/s.safetensors a --base=base.safetensors --out={place}/x.safetensors",
        f"convert {place}/x.safetensors --out={place}/plain",
    ):
        result = CliRunner().invoke(app, words.split())
        assert result.exit_code == 0, result.exception
    assert {"sum.safetensors", "merged", "s.safetensors", "x.safetensors", "plain"} <= set(os.listdir(real))
    assert not Path("~").exists()
