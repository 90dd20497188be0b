"""What goes with a result can be published: a card that the Hub reads, names instead of paths, and the push itself."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import huggingface_hub
import pytest
from huggingface_hub import ModelCard

from mergeflow.commands.merging import add_commands
from mergeflow.errors import MergeflowError
from mergeflow.merging import load_recipe, make_recipe, merge
from mergeflow.merging.files.card import published, push
from mergeflow.merging.files.convert import convert
from tests.command import invoke
from tests.merging.model_folders import TEXT, llama, save, tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A base from the Hub, and two experts of it with licences of their own."""
    folder = tmp_path_factory.mktemp("private-place")
    words = tokenizer("BPE", TEXT)
    for seed, name in enumerate(("base", "a", "b")):
        save(folder / name, llama(300, seed), words)
    card(folder / "base", "license: apache-2.0\npipeline_tag: text-generation\nlibrary_name: transformers")
    card(folder / "a", "license: mit")
    card(folder / "b", "license: llama3.1")
    for name, other in {
        "base": {"_name_or_path": "big/base-7B"},
        "a": {"_name_or_path": str(folder / "somewhere")},
    }.items():
        path = folder / name / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **other}))
    settings = folder / "base/tokenizer_config.json"
    local = {"name_or_path": str(folder / "words"), "special_tokens_map_file": "/root/.cache/map.json"}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **local}))
    (folder / "base/trainer_state.json").write_text(json.dumps({"best_model_checkpoint": str(folder)}))
    return folder


def card(folder, text):
    (folder / "README.md").write_text(f"---\n{text}\n---\n# A model\n")


def plan(models, out, **changes):
    experts = {name: str(models / name) for name in "ab"}
    return {"method": "ties", "base": str(models / "base"), "experts": experts, "out": str(out), **changes}


@pytest.mark.parametrize("out", ["out", "out.safetensors"])
def test_no_path_of_this_machine_is_in_what_a_merge_makes(models, tmp_path, out):
    merge(plan(models, tmp_path / "made" / out, shard_size="8KB" if out == "out" else None, weights={"a": 0.5}))
    convert(models / "base", tmp_path / "made" / "converted", "float16")
    made = [path for path in (tmp_path / "made").rglob("*") if path.is_file()]
    assert len(made) > 5
    for path in made:
        content = path.read_bytes()
        for private in (str(models), str(tmp_path), str(Path.home()) + "/", "/root/.cache"):
            assert private.encode() not in content, (path.name, private)


def test_the_front_matter_is_what_the_hub_reads(models, tmp_path):
    merge(plan(models, tmp_path / "out", weights={"a": 0.5}))
    read = ModelCard.load(tmp_path / "out/README.md")
    assert read.data.to_dict() == {
        "library_name": "transformers",
        "base_model": ["big/base-7B"],
        "base_model_relation": "merge",
        "license": "llama3.1",
        "pipeline_tag": "text-generation",
        "tags": ["merge", "mergeflow", "model-merging", "ties"],
    }
    for part in (
        '  merge{{"ties<br>scale 1.0, keep 0.2, trim global, reduce mean"}} --> result(["result"])',
        '  expert0["a"] -- "0.5" --> merge',
        "| a | `a` | mit | `",
        "licences differ: 'base' apache-2.0; 'a' mit; 'b' llama3.1; the result's card says llama3.1",
    ):
        assert part in read.text
    merge(plan(models, tmp_path / "out"))  # our own card may be replaced


def test_conflicting_licences_leave_the_card_without_one(models, tmp_path):
    save(tmp_path / "c", llama(300, 7), tokenizer("BPE", TEXT))
    card(tmp_path / "c", "license: cc-by-nc-4.0")
    made = merge(plan(models, tmp_path / "out", experts={"b": str(models / "b"), "c": str(tmp_path / "c")}))
    read = ModelCard.load(tmp_path / "out/README.md")
    assert read.data.license is None
    assert any("licences conflict" in warning for warning in made.warnings)
    assert "licences conflict: 'base' apache-2.0; 'b' llama3.1; 'c' cc-by-nc-4.0: read their terms" in read.text


def test_licence_texts_of_all_inputs_go_with_the_result(models, tmp_path):
    free, bound = "Apache License\n  Version 2.0, January 2004\n", "LLAMA 3.1 COMMUNITY LICENSE AGREEMENT\nTerms\n"
    for seed, (name, text) in enumerate((("base", free), ("c", bound), ("d", free))):
        save(tmp_path / name, llama(300, seed), tokenizer("BPE", TEXT))
        (tmp_path / name / "LICENSE.txt").write_text(text)
        card(tmp_path / name, f"license: {'apache-2.0' if text == free else 'llama3.1'}")
    (tmp_path / "c/NOTICE").write_text("Llama 3.1 is licensed under …")
    experts = {name: str(tmp_path / name) for name in "cd"}
    made = merge(plan(tmp_path, tmp_path / "out", experts=experts))
    out = tmp_path / "out"
    assert {path.name for path in out.glob("[LN][IO]*")} == {"LICENSE.txt", "LICENSE-base.txt", "NOTICE"}
    assert (out / "LICENSE.txt").read_text() == bound
    assert (out / "LICENSE-base.txt").read_text() == free
    assert ModelCard.load(out / "README.md").data.license == "llama3.1"
    assert "licences differ: 'base', 'd' apache-2.0; 'c' llama3.1" in made.warnings[0]
    assert {"LICENSE.txt", "LICENSE-base.txt", "NOTICE"} <= set(
        json.loads((out / "mergeflow.json").read_text())["files"]
    )
    (tmp_path / "d/LICENSE.txt").write_text("Ask us first.")
    (tmp_path / "d/README.md").unlink()
    merge(plan(tmp_path, tmp_path / "out", experts=experts))
    assert {path.name for path in out.glob("L*")} == {f"LICENSE-{name}.txt" for name in ("base", "c", "d")}
    assert "'d' see LICENSE.txt" in (out / "README.md").read_text()
    adapter = merge(plan(tmp_path, tmp_path / "adapter", experts={"c": experts["c"]}, adapter=4))
    assert (adapter.path / "LICENSE.txt").read_text() == bound


def test_files_without_folders_have_a_card_too(files, monkeypatch):
    monkeypatch.chdir(files)
    merge({"method": "average", "experts": ["expert0.safetensors", "expert1.safetensors"], "out": "m.safetensors"})
    read = ModelCard.load("m.md")
    assert read.data.to_dict() == {"tags": ["merge", "mergeflow", "model-merging", "average"]}
    assert 'base["base"]' not in read.text


def test_names_in_place_of_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = {
        "x": "/srv/one/model",
        "y": "/srv/two/model",
        "z": str(tmp_path / "in/z"),
        "h": "big/base@main",
        "r": "../r",
    }
    recipe = published(make_recipe({"method": "average", "base": "~/base", "experts": paths, "out": "/srv/out"}))
    assert (recipe.base, recipe.out) == ("base", "out")
    assert dict(recipe.experts) == {"x": "one/model", "y": "two/model", "z": "in/z", "h": "big/base@main", "r": "../r"}


def test_the_card_s_recipe_makes_the_model_again_beside_the_inputs(models, tmp_path, monkeypatch):
    made = merge(plan(models, tmp_path / "out"))
    text = (tmp_path / "out/README.md").read_text()
    (tmp_path / "recipe.json").write_text(text.split("```json\n")[1].split("```")[0])
    monkeypatch.chdir(models)
    assert merge(load_recipe(tmp_path / "recipe.json"), out=tmp_path / "again").fingerprint == made.fingerprint


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub's HTTP interface as an upload of a folder uses; what arrives is kept in `files`."""

    files: ClassVar[dict[str, bytes]] = {}
    blobs: ClassVar[dict[str, bytes]] = {}
    token = "hf_right"

    def answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

    def do_GET(self):
        right = self.headers.get("Authorization") == f"Bearer {self.token}"
        if self.path == "/api/whoami-v2":
            return self.answer({"name": "me", "type": "user"} if right else {"error": "no"}, 200 if right else 401)
        return self.answer({"error": "unknown"}, 404)

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.blobs[hashlib.sha256(body).hexdigest()] = body
        self.answer({})

    def do_POST(self):
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        home = f"http://127.0.0.1:{self.server.server_port}"
        if self.path == "/api/repos/create":
            return self.answer({"url": f"{home}/me/merged", "id": "me/merged"})
        if self.path.endswith("/api/validate-yaml"):
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(raw)["files"]]
            modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
            listed = [{"path": path, "uploadMode": modes[path], "shouldIgnore": False} for path in paths]
            return self.answer({"files": listed})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(raw)["objects"]
            actions = [{**blob, "actions": {"upload": {"href": f"{home}/blob/{blob['oid']}"}}} for blob in objects]
            return self.answer({"transfer": "basic", "objects": actions})
        if "/commit/" in self.path:
            for line in map(json.loads, raw.decode().splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[value["path"]] = self.blobs[value["oid"]]
            return self.answer({"success": True, "commitOid": "0" * 40, "commitUrl": f"{home}/me/merged/commit/0"})
        return self.answer({"error": self.path}, 404)


@pytest.fixture
def hub(monkeypatch):
    """A Hub on this machine, with nobody logged in."""
    served = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Hub.files, Hub.blobs = {}, {}
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr("mergeflow.merging.files.card._hub", lambda: client)
    client = huggingface_hub.HfApi(endpoint=f"http://127.0.0.1:{served.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    yield client
    served.shutdown()
    served.server_close()


@pytest.fixture(scope="module")
def merged(models, tmp_path_factory):
    return merge(plan(models, tmp_path_factory.mktemp("merged") / "out", shard_size="20KB")).path


def test_what_a_merge_made_is_pushed_and_nothing_else(merged, hub):
    with pytest.raises(MergeflowError, match=r"nobody is logged in to the Hub \(.*\): run `hf auth login`"):
        push(merged, "me/merged")
    assert not Hub.files
    hub.token = Hub.token
    (merged / "notes.txt").write_text("mine")
    said = []
    made = push(merged, "me/merged", say=said.append)
    (merged / "notes.txt").unlink()
    assert made.url.endswith("/me/merged/commit/0")
    assert Hub.files == {path.name: path.read_bytes() for path in merged.iterdir()}
    assert len([name for name in Hub.files if name.endswith(".safetensors")]) > 1
    assert made.warnings == ()


def test_offline_nothing_is_pushed(merged, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MergeflowError, match="HF_HUB_OFFLINE is set"):
        push(merged, "me/merged")


def test_a_dry_run_needs_nobody_and_says_what_would_go(merged):
    ran = invoke(add_commands, "push", merged, "me/merged", "--dry-run")
    assert ran.exit_code == 0, ran.output
    assert "README.md" in ran.output
    assert "nothing was sent: without --dry-run these files go to me/merged" in ran.output


def test_what_is_not_a_merge_s_is_not_pushed(models, tmp_path):
    with pytest.raises(MergeflowError, match=r"not a folder that a merge made: it has no mergeflow.json"):
        push(models / "base", "me/merged", dry_run=True)
    with pytest.raises(MergeflowError, match="expected owner/name"):
        push(models / "base", "merged", dry_run=True)
    made = merge(plan(models, tmp_path / "out")).path
    adapter = merge(plan(models, tmp_path / "adapter", adapter=4)).path
    for file in (made / "model.safetensors", adapter / "adapter_model.safetensors"):
        push(file.parent, "me/merged", dry_run=True)
        raw = bytearray(file.read_bytes())
        raw[-3] ^= 1
        file.write_bytes(raw)
        with pytest.raises(MergeflowError, match=r"weights of .* are not those that its mergeflow.json records"):
            push(file.parent, "me/merged", dry_run=True)
    (made / "config.json").unlink()
    with pytest.raises(MergeflowError, match=r"lacks \['config.json'\]"):
        push(made, "me/merged", dry_run=True)
