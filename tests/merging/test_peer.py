"""The peer itself: mergekit, in an environment of its own, merges tiny Llamas as its configuration says; so do we.

`MERGEFLOW_PEER_PYTHON` names a Python that has mergekit; without it an environment is made, where packages can be had.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from mergeflow.errors import MergeflowError
from mergeflow.merging import make_recipe, merge
from mergeflow.merging.files.mergekit import converted
from tests.merging.families import shrunk
from tests.merging.mergekit_generator import Generator
from tests.merging.model_folders import TEXT, llama, save, tokenizer
from tests.merging.test_mergekit import CONFIGURATIONS, OF_SLICES, SLERPED, written_back
from tests.merging.tiny_models import tiny

pytestmark = pytest.mark.nightly
PEER, GENERATED = "mergekit==0.1.5", 200
RUN = """
import json, sys, traceback, torch, yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions

told = {}
for name, (file, out) in json.load(open(sys.argv[1])).items():
    try:
        config = MergeConfiguration.model_validate(yaml.safe_load(open(file)))
        run_merge(config, out, MergeOptions(copy_tokenizer=False, random_seed=0, quiet=True))
    except Exception:
        told[name] = traceback.format_exc()[-2000:]
json.dump(told, open(sys.argv[2], "w"))
"""
# Documented forms beside those of test_mergekit.py: every method, and layers of models.
MORE = {
    "slices": SLERPED,
    "slices without parameters": """
        {merge_method: passthrough, slices: [{sources: [{model: a, layer_range: [0, 4]}]},
                                             {sources: [{model: b, layer_range: [2, 5]}]}]}""",
    "a scale of one source": OF_SLICES["a scale of one source"],
    "karcher": """
        {merge_method: karcher, base_model: base, parameters: {max_iter: 5, tol: 1e-5},
         models: [{model: a, parameters: {weight: 0.6}}, {model: b, parameters: {weight: 0.4}}]}""",
    "model_stock": """
        {merge_method: model_stock, base_model: base,
         models: [{model: a, parameters: {weight: 0.6}}, {model: b, parameters: {weight: 0.4}}]}""",
    "model_stock by rows": """
        {merge_method: model_stock, base_model: base, parameters: {filter_wise: true},
         models: [{model: a}, {model: b}]}""",
    "nuslerp by columns": """
        {merge_method: nuslerp, base_model: base, parameters: {nuslerp_row_wise: true, nuslerp_flatten: false},
         models: [{model: a, parameters: {weight: 0.6}}, {model: b, parameters: {weight: 0.4}}]}""",
    "arcee_fusion": "{merge_method: arcee_fusion, base_model: a, models: [{model: a}, {model: b}]}",
    "ramplus_tl": """
        {merge_method: ramplus_tl, base_model: base, parameters: {r: 0.05, alpha: 1.0, epsilon: 0.05},
         models: [{model: a}, {model: b}]}""",
    "passthrough": """
        {merge_method: passthrough,
         models: [{model: a, parameters: {scale: [{filter: o_proj, value: 0}, {value: 1}]}}]}""",
    "a base among the models": """
        {merge_method: ties, base_model: base, parameters: {normalize: false, int8_mask: true},
         models: [{model: base}, {model: a, parameters: {density: 0.5, weight: 0.5}},
                  {model: b, parameters: {density: 0.5, weight: 0.5}}]}""",
}
# Largest difference from the peer's result, of weights of about 1; it adds 1e-8 to norms in multislerp,
# and divides counts in float32 in ramplus_tl.
BOUND, BOUNDS = 1e-14, {"multislerp": 5e-9, "ramplus_tl": 1e-7, "karcher": 1e-8}
PROJECTOR = ("linear_1.weight", "linear_2.weight", "merging_layer.weight")
BEFORE = ("embed_tokens.weight", "patch_conv.weight", "ln_pre.weight", "relative_attention_bias.weight")
# Notes of a conversion that say which tensors are otherwise.
BEHIND = {
    "follows the last block": ("norm.weight", "lm_head.weight", *PROJECTOR),
    "a slice of one layer": ("norm.weight", "lm_head.weight", *BEFORE),
    "`relative_attention_bias`": ("relative_attention_bias.weight",),
}
# Entries of a tensor that cuts which are rounded otherwise leave or take: two of each expert at most.
ENTRIES = {"breadcrumbs": 6, "breadcrumbs_ties": 6}


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> str:
    if given := os.environ.get("MERGEFLOW_PEER_PYTHON"):
        return given
    place = tmp_path_factory.mktemp("peer") / "env"
    python = str(place / "bin/python")
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    # torch comes from here: its own would be several gigabytes.
    folder = next(place.glob("lib/python*/site-packages"))
    (folder / "shared.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    pinned = f"torch=={torch.__version__.partition('+')[0]}"
    made = [python, "-m", "pip", "install", "-q", PEER, pinned]
    done = subprocess.run(made, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        pytest.skip(f"{PEER} cannot be installed: {done.stderr[-300:]}")
    return python


def with_paths(config: Any, folder: Path) -> Any:
    """A configuration whose models are folders."""
    if isinstance(config, dict):
        return {
            key: str(folder / value) if key in ("model", "base_model", "source_model") else with_paths(value, folder)
            for key, value in config.items()
        }
    return [with_paths(value, folder) for value in config] if isinstance(config, list) else config


def configurations() -> dict[str, dict[str, Any]]:
    """All configurations by name."""
    documents = {name: yaml.safe_load(text) for name, text in (CONFIGURATIONS | MORE).items()}
    documents |= {
        f"{name}, written back": written_back(configuration)
        for name, configuration in documents.items()
        if "models" in configuration
    }
    return documents | {f"generated {seed}": Generator(seed).configuration() for seed in range(GENERATED)}


@pytest.fixture(scope="module")
def results(peer: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder with all models and the peer's results, and what went wrong there, by configuration."""
    folder = tmp_path_factory.mktemp("merges")
    generator = torch.Generator().manual_seed(0)
    for name in ("base", "a", "b", "c"):
        model: Any = tiny("llama", num_hidden_layers=5).double()
        common = torch.Generator().manual_seed(1)  # task vectors that agree in part, as those of real experts do
        with torch.no_grad():
            for value in model.parameters() if name != "base" else ():
                for source in (generator, common):
                    value.add_(0.1 * torch.randn(value.shape, generator=source, dtype=value.dtype))
        model.save_pretrained(folder / name)
    return folder, merged_there(peer, folder, configurations())


def compare(folder: Path, which: str) -> str:
    """Merge a configuration as its recipe says, and return whether the result is the peer's: equal, or noted."""
    config = yaml.safe_load((folder / f"{which}.yml").read_text())
    recipe, notes = converted([config])
    made = merge(make_recipe({**recipe, "out": str(folder / f"{which}-ours")}))
    ours, theirs = (load_file(place / "model.safetensors") for place in (made.path, folder / f"{which}-theirs"))
    method = config["merge_method"]
    bound = BOUNDS.get(method, BOUND)
    noted = tuple(end for text, ends in BEHIND.items() if any(text in note for note in notes) for end in ends)
    assert all(name.endswith(noted or ("nothing",)) for name in ours.keys() ^ theirs.keys())
    outcome = "equal" if ours.keys() == theirs.keys() else "noted"
    for name in ours.keys() & theirs.keys():
        away = int(((ours[name] - theirs[name]).abs() > bound).sum())
        if away and (name.endswith(noted) or away <= ENTRIES.get(method, 0) or _pointing_apart(method, notes)):
            outcome = "noted"
        else:
            assert not away, f"{which}: {away} entries of {name}, {notes}"
    return outcome


def counted(folder: Path, refusals: dict[str, str]) -> Counter[str]:
    """Compare all generated configurations of a folder."""
    counts: Counter[str] = Counter()
    faults = []
    for which in sorted(place.stem for place in folder.glob("generated*.yml")):
        try:
            counts[compare(folder, which) if which not in refusals else "theirs refused"] += 1
        except MergeflowError as error:
            counts["ours refused" if which not in refusals else "both refused"] += 1
            print(which, error)
        except AssertionError as error:
            faults.append(str(error))
    print(counts)
    assert not faults, "\n".join(faults)
    return counts


def _pointing_apart(method: str, notes: list[str]) -> bool:
    return method == "model_stock" and any("negative mean cosine" in note for note in notes)


@pytest.mark.parametrize("which", [*CONFIGURATIONS, *MORE])
def test_the_peer_and_we_agree(results: tuple[Path, dict[str, str]], which: str) -> None:
    folder, refusals = results
    assert which not in refusals, refusals[which]
    compare(folder, which)
    if which in MORE or "models" not in yaml.safe_load(CONFIGURATIONS[which]):
        return
    assert f"{which}, written back" not in refusals
    compare(folder, f"{which}, written back")


def test_generated_configurations_are_equal_or_named(results: tuple[Path, dict[str, str]]) -> None:
    counts = counted(*results)
    assert counts["equal"] >= 0.5 * GENERATED
    assert counts["equal"] + counts["noted"] >= 0.95 * GENERATED


OF_MODULES = {
    "T5ForConditionalGeneration": ("t5", ("encoder", "decoder", "shared")),
    "Mistral3ForConditionalGeneration": ("mistral3", ("multi_modal_projector", "vision_tower", "text_decoder")),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", ("multi_modal_projector", "vision_tower", "text_decoder")),
}


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("kind", OF_MODULES)
def test_modules_that_are_merged_in_different_ways(peer: str, tmp_path: Path, kind: str, sliced: bool) -> None:
    """Each of three modules has models and parameters of its own, one perhaps other models in each block."""
    family, modules = OF_MODULES[kind]
    for seed, name in enumerate(("base", "a", "b")):
        save_random(tmp_path / name, kind, family, seed)
    both = [{"model": "a", "parameters": {"weight": 0.7}}, {"model": "b"}]
    in_place = [
        {"sources": [{**source, "layer_range": [at, at + 1]} for source in (*both[:count], {"model": "base"})]}
        for at, count in enumerate((2, 1))
    ]
    parts: list[dict[str, Any]] = [
        {"models": both, "parameters": {"normalize": True}},
        {"slices": in_place} if sliced else {"models": both, "parameters": {"density": 0.4}},
        {"models": both[:1]},
    ]
    config = {"merge_method": "ties", "base_model": "base", "parameters": {"weight": 0.5, "normalize": False}}
    config["modules"] = dict(zip(modules, parts, strict=True))
    assert merged_there(peer, tmp_path, {"modules": config}) == {}
    assert compare(tmp_path, "modules") == "equal"


MOVED = {
    "LlamaForCausalLM": ("llama", {"default": 2}),
    "T5ForConditionalGeneration": ("t5", {"encoder": 2, "decoder": 2, "shared": 0}),
    "Mistral3ForConditionalGeneration": (
        "mistral3",
        {"multi_modal_projector": 0, "vision_tower": 2, "text_decoder": 2},
    ),
}


@pytest.mark.parametrize("kind", MOVED)
def test_slices_that_move_layers(peer: str, tmp_path: Path, kind: str) -> None:
    """Whatever comes before, behind or between the layers is of the same models, unless a note says otherwise."""
    family, modules = MOVED[kind]
    for seed, name in enumerate(("base", "a", "b", "c")):
        save_random(tmp_path / name, kind, family, seed)
    configs = {f"generated {seed}": Generator(seed, modules).configuration() for seed in range(40)}
    counts = counted(tmp_path, merged_there(peer, tmp_path, configs))
    assert counts["equal"] + counts["noted"] >= 30, counts


RUN_MIXTURES = """
import json, sys, yaml
from mergekit.moe.config import MoEMergeConfig
from mergekit.options import MergeOptions
from mergekit.scripts.moe import build

for file, out in json.load(open(sys.argv[1])).values():
    build(MoEMergeConfig.model_validate(yaml.safe_load(open(file))), out, MergeOptions(random_seed=0, quiet=True))
json.dump({}, open(sys.argv[2], "w"))
"""
PROMPTED = [{"source_model": "a", "positive_prompts": ["the cat"]}, {"source_model": "b", "positive_prompts": ["mat"]}]
SHARED = {"source_model": "base", "residual_scale": 0.1}
# Family → configuration, and the tensors whose rows come from elsewhere.
MIXTURES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama": ({"gate_mode": "cheap_embed", "experts": PROMPTED, "experts_per_token": 1}, ()),
    "mistral": ({"gate_mode": "hidden", "experts": PROMPTED}, (".gate.weight",)),
    "qwen2": (
        {"gate_mode": "random", "experts": PROMPTED, "shared_experts": [SHARED]},
        (".gate.weight", "shared_expert_gate.weight"),
    ),
    "qwen3": ({"gate_mode": "random", "experts": PROMPTED}, (".gate.weight",)),
}


def test_mixtures_have_the_peer_s_experts(peer: str, tmp_path: Path) -> None:
    """All tensors of a mixture of each architecture, but for the routers that a note names."""
    jobs = {}
    for family, (mixture, _) in MIXTURES.items():
        place = tmp_path / family
        for seed, name in enumerate(("base", "a", "b")):
            model = tiny(family, seed, vocab_size=310, tie_word_embeddings=False)
            save(place / name, model, tokenizer("BPE", TEXT, "<|end|>"), eos_token="<|end|>")
        config = with_paths({**mixture, "base_model": "base", "dtype": "float32"}, place)
        (place / "mixture.yml").write_text(yaml.safe_dump(config))
        jobs[family] = str(place / "mixture.yml"), str(place / "theirs")
    run_peer(peer, tmp_path, jobs, RUN_MIXTURES)
    for family, (_, elsewhere) in MIXTURES.items():
        recipe, notes = converted([yaml.safe_load(Path(jobs[family][0]).read_text())])
        made = merge(make_recipe({**recipe, "out": str(tmp_path / family / "ours")}))
        places = made.path, Path(jobs[family][1])
        ours, theirs = (transformers.AutoModelForCausalLM.from_pretrained(place).state_dict() for place in places)
        assert ours.keys() == theirs.keys(), family
        for name in ours:
            if not name.endswith(elsewhere or ("nothing",)):
                torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6, msg=f"{family}: {name}")
        assert any("router rows" in note for note in notes)


def save_random(folder: Path, kind: str, family: str, seed: int) -> None:
    """Save a small model of a class in float64, with weights of visible size."""
    default = AutoConfig.for_model(family)
    gated = {"feed_forward_proj": "gated-gelu", "is_gated_act": True, "dense_act_fn": "gelu_new"}  # the peer's T5
    config = type(default).from_dict(shrunk(default.to_dict()) | (gated if family == "t5" else {}))
    model = getattr(transformers, kind)(config).double()
    generators = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            base, change = (torch.randn(value.shape, generator=each, dtype=value.dtype) for each in generators)
            value.copy_(base + 0.1 * change)
    model.save_pretrained(folder)


def merged_there(peer: str, folder: Path, configs: dict[str, Any]) -> dict[str, str]:
    """Write configurations and merge them by the peer, in float64; return what went wrong there, by name."""
    jobs = {}
    for which, config in configs.items():
        jobs[which] = str(folder / f"{which}.yml"), str(folder / f"{which}-theirs")
        text = yaml.safe_dump(with_paths(config, folder) | {"dtype": "float64"}, sort_keys=False)
        Path(jobs[which][0]).write_text(text)
    return run_peer(peer, folder, jobs)


def run_peer(peer: str, folder: Path, jobs: dict[str, tuple[str, str]], script: str = RUN) -> dict[str, str]:
    """Merge all configurations by the peer: name → (configuration, result); return what went wrong there, by name."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    run = [peer, "-c", script, str(folder / "jobs.json"), str(folder / "told.json")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=3000, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads((folder / "told.json").read_text()))


TOKENS = {
    "<x>": {"source": "a", "force": True},
    "<new>": {"source": {"kind": "zero"}},
    "<y>": {"source": {"kind": "model_token", "model": "b", "token": "<z>"}},
}


def test_vocabularies_have_the_peer_s_rows(peer: str, tmp_path: Path) -> None:
    """Union, base and an expert's vocabulary, padded tables, tokens that are added or come from elsewhere."""
    words = {"base": (), "a": ("<x>",), "b": ("<y>", "<z>")}
    made = {name: tokenizer("BPE", TEXT, "<|end|>", *tokens) for name, tokens in words.items()}
    for seed, (name, vocabulary) in enumerate(made.items()):
        save(tmp_path / name, llama(made["base"].get_vocab_size() + 6, seed).double(), vocabulary)
    models = [{"model": name, "parameters": {"weight": share}} for name, share in (("a", 0.6), ("b", 0.4))]
    sum_of = {"merge_method": "task_arithmetic", "base_model": "base", "models": models}
    mean_of = {"merge_method": "linear", "models": models}
    chosen = {
        "union": sum_of | {"tokenizer_source": "union"},
        "base": sum_of | {"tokenizer_source": "base"},
        "b": mean_of | {"tokenizer_source": str(tmp_path / "b")},
        "tokens": mean_of | {"tokenizer": {"source": "union", "tokens": with_sources(TOKENS, tmp_path)}},
    }
    assert merged_there(peer, tmp_path, chosen) == {}
    for which in chosen:
        recipe, _ = converted([yaml.safe_load((tmp_path / f"{which}.yml").read_text())])
        ours = by_token(merge(make_recipe({**recipe, "out": str(tmp_path / f"{which}-ours")})).path)
        theirs = by_token(tmp_path / f"{which}-theirs")
        assert ours.keys() == theirs.keys()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=BOUND)


def with_sources(tokens: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Tokens whose models are folders."""
    placed = with_paths(tokens, folder)
    for entry in placed.values():
        entry["source"] = str(folder / entry["source"]) if isinstance(entry["source"], str) else entry["source"]
    return dict(placed)


def by_token(folder: Path) -> dict[str, torch.Tensor]:
    """Rows of embeddings and head by token, and all other tensors; tables have no row beside the tokens'."""
    state, ids = load_file(folder / "model.safetensors"), AutoTokenizer.from_pretrained(folder).get_vocab()
    tables = {name: state.pop(name) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    assert {len(table) for table in tables.values()} == {len(ids)}
    return state | {f"{name} {token}": table[row] for name, table in tables.items() for token, row in ids.items()}
