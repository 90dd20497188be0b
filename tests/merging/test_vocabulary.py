"""Models of different vocabularies merge token by token, and the folder that comes out loads as one model."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergeflow.checkpoints import read_state as read
from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, merge
from tests.merging.model_folders import KINDS, OTHER, TEXT, llama, permuted, save, tokenizer
from tests.merging.tiny_models import tiny

ROWS = 16  # rows are a multiple of this, as padded vocabularies have them


def padded(made):
    return -(-made.get_vocab_size() // ROWS) * ROWS


def plan(tmp_path, experts=("a",), **changes):
    values = {"method": "task_arithmetic", "args": {"scale": 0.5}, "base": str(tmp_path / "base")}
    values["experts"] = {name: str(tmp_path / name) for name in experts}
    return {**values, "out": str(tmp_path / "out"), **changes}


def by_token(folder, name):
    """Rows of a table by token, and those of no token by row: what a merge must keep, however rows are numbered."""
    ids = AutoTokenizer.from_pretrained(folder).get_vocab()
    table = read(folder)[name]
    rest = sorted(set(range(len(table))) - set(ids.values()))
    return {token: table[row] for token, row in ids.items() if row < len(table)}, table[rest]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_new_tokens_of_one_expert_come_behind_the_base_s(tmp_path, kind, tied):
    plain, more = tokenizer(kind), tokenizer(kind, TEXT, "<|im_start|>", "<|im_end|>")
    save(tmp_path / "base", llama(plain.get_vocab_size(), 0, tied), plain)
    save(tmp_path / "a", llama(padded(more), 1, tied), more)
    save(tmp_path / "b", llama(plain.get_vocab_size(), 2, tied), plain)
    merge(plan(tmp_path, "ab", tokenizer_source="union"))
    out, rows = tmp_path / "out", plain.get_vocab_size() + 2
    states = {name: read(tmp_path / name) for name in ("base", "a", "b", "out")}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name not in states["base"]:
            continue
        base, a, b, merged = (state[name] for state in states.values())
        assert merged.shape == (rows, 16)
        torch.testing.assert_close(merged[:-2], base + 0.5 * (a[: rows - 2] - base) + 0.5 * (b - base))
        assert torch.equal(merged[-2:], a[rows - 2 : rows])  # only a has them: base and b take a's rows
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == rows
    loaded = AutoTokenizer.from_pretrained(out)
    text = "the cat <|im_start|>sat on<|im_end|> a table"
    assert loaded(text).input_ids == AutoTokenizer.from_pretrained(tmp_path / "a")(text).input_ids
    assert loaded.decode(loaded("<|im_end|>", add_special_tokens=False).input_ids, skip_special_tokens=True) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_the_union_of_different_tokenizers_holds_what_each_has(tmp_path, kind):
    made = {"base": tokenizer(kind, TEXT, "<|base|>"), "a": tokenizer(kind, OTHER, "<|a|>")}
    for seed, (name, words) in enumerate(made.items()):
        save(tmp_path / name, llama(padded(words), seed), words)
    merge(plan(tmp_path, tokenizer_source="union", method="average", args={}))
    out = tmp_path / "out"
    loaded = AutoTokenizer.from_pretrained(out)
    ids = loaded.get_vocab()
    assert set(ids) == set(made["base"].get_vocab()) | set(made["a"].get_vocab())
    assert {token: ids[token] for token in made["base"].get_vocab()} == made["base"].get_vocab()
    assert len(set(ids.values())) == len(ids) == max(ids.values()) + 1
    for text in (*TEXT[:3], *OTHER[:3], "x <|a|> y <|base|>"):
        assert loaded.decode(loaded(text, add_special_tokens=False).input_ids).split() == text.split() or kind != "BPE"
    assert any(loaded(text).input_ids != made["base"].encode(text).ids for text in OTHER)  # new tokens are reached
    model = AutoModelForCausalLM.from_pretrained(out)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    # The average of one expert is the expert: what it says of its tokens has not changed.
    shared = sorted(made["a"].get_vocab(), key=made["a"].get_vocab().get)
    text = torch.arange(12) * 3
    there = model(torch.tensor([[ids[shared[row]] for row in text]])).logits[..., [ids[token] for token in shared]]
    torch.testing.assert_close(there, alone(text[None]).logits[..., : len(shared)], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@settings(max_examples=12)
@given(st.data(), st.sampled_from(sorted(KINDS)), st.booleans(), st.sampled_from(["base", "union"]))
def test_permuting_an_expert_s_vocabulary_changes_nothing(tmp_path_factory, data, kind, tied, source):
    tmp_path = tmp_path_factory.mktemp("permuted")
    words = tokenizer(kind)
    size = words.get_vocab_size()
    order = data.draw(st.permutations(range(size)))
    save(tmp_path / "base", llama(size, 0, tied), words)
    expert = llama(size, 1, tied)
    save(tmp_path / "a", expert, words)
    for table in {id(p): p for p in (expert.model.embed_tokens.weight, expert.lm_head.weight)}.values():
        table.data[torch.tensor(order)] = table.data.clone()
    save(tmp_path / "p", expert, permuted(words, order))
    merge(plan(tmp_path, out=str(tmp_path / "plain")))
    merge(plan(tmp_path, "p", tokenizer_source=source))
    plain, aligned = read(tmp_path / "plain"), read(tmp_path / "out")
    assert plain.keys() == aligned.keys()
    assert all(torch.equal(plain[name], aligned[name]) for name in plain)
    assert (tmp_path / "out/tokenizer.json").read_text() == (tmp_path / "base/tokenizer.json").read_text()
    merge(plan(tmp_path, "p", tokenizer_source="p", out=str(tmp_path / "turned")))
    for name in ("model.embed_tokens.weight", *(["lm_head.weight"] if not tied else [])):
        expected, rows = by_token(tmp_path / "out", name)[0], by_token(tmp_path / "turned", name)[0]
        assert expected.keys() == rows.keys()
        assert all(torch.equal(rows[token], expected[token]) for token in expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_union_of_equal_vocabularies_is_the_identity(tmp_path, kind):
    words = tokenizer(kind, TEXT, "<|x|>")
    for seed, name in enumerate(("base", "a", "b")):
        save(tmp_path / name, llama(padded(words), seed), words)
    merge(plan(tmp_path, "ab", out=str(tmp_path / "plain")))
    merge(plan(tmp_path, "ab", tokenizer_source="union"))
    for path in sorted((tmp_path / "plain").iterdir()):
        same = path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
        assert same or path.suffix in (".safetensors", ".md") or path.name == "mergeflow.json", path
    plain, written = read(tmp_path / "plain"), read(tmp_path / "out")
    assert all(torch.equal(plain[name], written[name]) for name in plain)


@pytest.fixture
def three(tmp_path):
    """A base, `a` with tokens x and y, `b` with y alone."""
    for seed, (name, tokens) in enumerate({"base": (), "a": ("<x>", "<y>"), "b": ("<y>",)}.items()):
        made = tokenizer("BPE", TEXT, *tokens)
        save(tmp_path / name, llama(made.get_vocab_size(), seed), made)
    return tmp_path


EMBEDDING = "model.embed_tokens.weight"


def union_rows(three, tokens, scale=1.0, **changes):
    """Embeddings of the tokens x and y in a union, with those of the inputs."""
    choice = {"source": "union", "tokens": tokens, **changes}
    merge(plan(three, "ab", args={"scale": scale}, tokenizer=choice))
    rows = {name: by_token(three / name, EMBEDDING)[0] for name in ("a", "b", "base", "out")}
    return rows.pop("out"), rows["a"], rows["b"], rows["base"]


def test_a_token_that_several_experts_have_is_their_mean_elsewhere(three):
    out, a, b, _ = union_rows(three, {})
    mean = (a["<y>"] + b["<y>"]) / 2  # the base's row
    torch.testing.assert_close(out["<y>"], mean + (a["<y>"] - mean) + (b["<y>"] - mean))
    assert torch.equal(out["<x>"], a["<x>"])


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"source": "a"}, lambda a, b, base: a["<y>"] + (b["<y>"] - a["<y>"])),
        ({"source": "b", "force": True}, lambda a, b, base: b["<y>"]),
        ({"source": {"kind": "zero"}}, lambda a, b, base: a["<y>"] + b["<y>"]),
        ({"source": {"kind": "zero"}, "force": True}, lambda a, b, base: 0 * a["<y>"]),
        ({"source": {"kind": "mean"}, "force": True}, lambda a, b, base: (a["<y>"] + b["<y>"]) / 2),
        ({"force": True}, lambda a, b, base: (a["<y>"] + b["<y>"]) / 2),
        (
            {"source": {"kind": "model_token", "model": "base", "token": "Ġcat"}, "force": True},
            lambda a, b, base: base["Ġcat"],
        ),
        (
            {"source": {"kind": "model_token", "model": "a", "token_id": 7}},
            lambda a, b, base: a["<y>"] + b["<y>"] - a["("],
        ),
    ],
)
def test_what_a_token_s_embedding_is_may_be_said(three, choice, expected):
    out, *inputs = union_rows(three, {"<y>": choice})
    torch.testing.assert_close(out["<y>"], expected(*inputs))


def test_rows_are_padded_with_the_mean_of_the_tokens_rows(three):
    """Rows of zeros in a head are the most likely tokens where all other scores are negative."""
    merge(plan(three, "ab", tokenizer={"source": "union", "pad_to_multiple_of": 64}))
    tables = read(three / "out")
    named, rest = by_token(three / "out", "lm_head.weight")
    assert len(tables[EMBEDDING]) % 64 == 0
    assert (
        len(named) + len(rest)
        == len(tables[EMBEDDING])
        == json.loads((three / "out/config.json").read_text())["vocab_size"]
    )
    mean = torch.stack(list(named.values())).double().mean(0).float()
    assert len(rest)
    torch.testing.assert_close(rest, mean.expand_as(rest))
    AutoModelForCausalLM.from_pretrained(three / "out")


def test_an_expert_s_tokenizer_brings_its_files_and_its_ids(tmp_path):
    plain = tokenizer("BPE", TEXT, "<|end|>")
    turned = permuted(plain, list(reversed(range(plain.get_vocab_size() - 1))))
    more = Tokenizer.from_str(turned.to_str())
    more.add_special_tokens(["<|eot|>"])
    base = llama(plain.get_vocab_size(), 0, bos_token_id=5, eos_token_id=plain.token_to_id("<|end|>"), pad_token_id=3)
    base.generation_config.suppress_tokens = [4]
    save(tmp_path / "base", base, plain, eos_token="<|end|>", chat_template="base {{ messages }}")
    size = more.get_vocab_size()
    expert = llama(size, 1, bos_token_id=None, eos_token_id=more.token_to_id("<|eot|>"))
    save(tmp_path / "chat", expert, more, eos_token="<|eot|>", chat_template="chat {{ messages }}")
    (tmp_path / "base/added_tokens.json").write_text("{}")
    merge(plan(tmp_path, ["chat"], tokenizer_source="chat"))
    config, folder = json.loads((tmp_path / "out/config.json").read_text()), tmp_path / "out"
    assert (config["eos_token_id"], config["vocab_size"]) == (more.token_to_id("<|eot|>"), size)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"]
    assert generation["suppress_tokens"] == [turned.token_to_id(plain.id_to_token(4))]
    assert not (folder / "added_tokens.json").exists()
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|eot|>"
    assert (folder / "chat_template.jinja").read_text() == "chat {{ messages }}"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False).shape[1] > 3


def test_the_base_s_tokens_alone_leave_experts_tokens_out(three):
    merge(plan(three, "ab", tokenizer_source="base", args={"scale": 1.0}))
    assert read(three / "out")[EMBEDDING].shape == read(three / "base")[EMBEDDING].shape
    lines = "\n".join(check_recipe(plan(three, "ab", tokenizer_source="base", out=None)).lines())
    assert "2 of the" in lines
    assert "tokens of 'a' are not in it and are left out" in lines


def test_what_cannot_be_aligned_is_refused_with_the_way_out(three):
    def refused(match, **changes):
        for run in (check_recipe, merge):
            with pytest.raises(MergeflowError, match=match):
                run(plan(three, "ab", **changes))

    refused(r"base has \[\d+, 16\]")
    refused(r"unknown source of the tokenizer 'c': .*Known: a, b, base, union", tokenizer_source="c")
    refused("makes a model folder", tokenizer="union", out=str(three / "out.safetensors"))
    unknown = {"source": "union", "tokens": {"<z>": {}, "<y>": {"source": "c"}}}
    both = r"(?s)source of the token '<y>' 'c'.*unknown token of `tokenizer.tokens` '<z>': .*<x>"
    refused(both, tokenizer=unknown)
    lacking = {"source": "union", "tokens": {"<y>": {"source": "base"}}}
    refused("'base', which has no token '<y>'", tokenizer=lacking)
    refused("keep one", tokenizer="base", tokenizer_source="base")
    save(three / "b", llama(60, 2), tokenizer("Unigram", OTHER))
    refused("'b' Unigram.*no tokenizer is the union", tokenizer_source="union")
    (three / "a/tokenizer.json").rename(three / "a/tokenizer.model")
    (three / "b/tokenizer.json").write_text('{"model": {}}')
    refused(
        r"(?s)has 'tokenizer.model' but no tokenizer.json.*save_pretrained.*holds no vocabulary", tokenizer_source="a"
    )


ARCHITECTURES = [
    *("gpt2", "gpt_neox", "bloom", "gemma2", "qwen2", "mixtral", "opt", "phi3", "t5", "bart"),
    *("bert", "roberta", "distilbert", "electra", "albert", "deberta-v2", "modernbert", "ctrl"),
]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_embeddings_that_transformers_itself_resized_are_aligned(tmp_path, name):
    plain = tokenizer("WordPiece", TEXT)
    rows = plain.get_vocab_size()
    base = tiny(name, vocab_size=rows)
    save(tmp_path / "base", base, plain)
    expert = tiny(name, seed=1, vocab_size=rows)
    expert.resize_token_embeddings(rows + 3, mean_resizing=False)
    save(tmp_path / "a", expert, tokenizer("WordPiece", TEXT, "<1>", "<2>", "<3>"))
    merge(plan(tmp_path, tokenizer_source="union", method="average", args={}))
    expected, written = read(tmp_path / "a"), read(tmp_path / "out")
    assert expected.keys() == written.keys()
    for tensor in expected:
        torch.testing.assert_close(written[tensor], expected[tensor])  # base + (expert - base) rounds
    loaded, report = type(expert).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.config.get_text_config().vocab_size == rows + 3


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_has_the_base_s_vocabulary_or_its_own(three):
    peft = pytest.importorskip("peft")
    words = tokenizer("BPE", TEXT, "<x>", "<y>")
    base = AutoModelForCausalLM.from_pretrained(three / "base")
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(three / "plain")
    base = AutoModelForCausalLM.from_pretrained(three / "base")
    base.resize_token_embeddings(words.get_vocab_size(), mean_resizing=False)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(three / "grown")
    save(three / "words", llama(8, 0), words)
    for file in (three / "words").glob("tokenizer*"):
        file.rename(three / "grown" / file.name)
    merge(plan(three, ("plain", "grown"), tokenizer_source="union", args={"scale": 1.0}))
    whole = AutoModelForCausalLM.from_pretrained(three / "out")
    there = adapted.merge_and_unload()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(value, there.state_dict()[name])
    assert whole.lm_head.weight.shape[0] == words.get_vocab_size()


def test_types_shards_and_older_files(tmp_path):
    plain, more = tokenizer(), tokenizer("BPE", TEXT, "<new>")
    rows = plain.get_vocab_size()
    save(tmp_path / "base", llama(rows, 0).to(torch.bfloat16), plain)
    save(tmp_path / "a", llama(rows + 1, 1).to(torch.float16), more)
    content = json.loads((tmp_path / "base/tokenizer.json").read_text())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    del content["model"]["type"]
    (tmp_path / "base/tokenizer.json").write_text(json.dumps(content))
    settings = json.loads((tmp_path / "base/tokenizer_config.json").read_text())
    (tmp_path / "base/tokenizer_config.json").write_text(json.dumps({**settings, "added_tokens_decoder": {}}))
    (tmp_path / "base/vocab.json").write_text("{}")
    merge(plan(tmp_path, tokenizer_source="union", shard_size="8KB", args={"scale": 1.0}))
    written = read(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*"))) > 2
    assert torch.equal(written[EMBEDDING][-1], read(tmp_path / "a")[EMBEDDING][-1].bfloat16())
    settings = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert settings["added_tokens_decoder"][str(rows)]["content"] == "<new>"
    assert not (tmp_path / "out/vocab.json").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("<new>").input_ids == [rows]


def test_the_record_makes_the_same_again(three, monkeypatch):
    monkeypatch.chdir(three)
    tokens = {
        "<y>": {"source": {"kind": "model_token", "model": "a", "token_id": 7}, "force": True},
        "<x>": {"source": "a"},
    }
    first = merge(plan(three, "ab", tokenizer={"source": "union", "tokens": tokens, "pad_to_multiple_of": 8}))
    record = json.loads((three / "out/mergeflow.json").read_text())["recipe"]
    assert record["tokenizer"]["tokens"]["<x>"] == {
        "source": {"kind": "model", "model": "a"},
        "force": False,
        "new": False,
    }
    assert merge(record, out=three / "again").fingerprint == first.fingerprint
    wrong = {"sorce": "union", "tokens": {"<x>": {"source": {"kind": "zero", "model": "a"}}}, "pad_to_multiple_of": 0}
    with pytest.raises(MergeflowError) as error:
        check_recipe(plan(three, "ab", tokenizer=wrong))
    for part in (
        "unknown key of tokenizer 'sorce': did you mean 'source'",
        "kind 'zero' takes no model",
        "pad_to_multiple_of",
    ):
        assert part in str(error.value)


def test_a_token_that_no_model_has_is_added_where_the_recipe_says_so(three):
    tokens = {"<new>": {"new": True}, "<also>": {"new": True, "source": {"kind": "model", "model": "a"}}}
    with pytest.raises(MergeflowError, match="'<also>' is to come from 'a', which has no token"):
        check_recipe(plan(three, "ab", tokenizer={"source": "union", "tokens": tokens}))
    tokens["<also>"] = {"new": True, "source": {"kind": "model_token", "model": "a", "token": "Ġcat"}}
    merge(plan(three, "ab", tokenizer={"source": "union", "tokens": tokens}))
    rows, _ = by_token(three / "out", EMBEDDING)
    assert not rows["<new>"].any()
    torch.testing.assert_close(rows["<also>"], by_token(three / "a", EMBEDDING)[0]["Ġcat"])
    ids = AutoTokenizer.from_pretrained(three / "out")("the cat<new>").input_ids
    assert ids[-1] == AutoTokenizer.from_pretrained(three / "out").get_vocab()["<new>"]
    with pytest.raises(MergeflowError, match=r"unknown token of `tokenizer.tokens` '<newer>'"):
        check_recipe(plan(three, "ab", tokenizer={"source": "union", "tokens": {"<newer>": {"force": True}}}))
