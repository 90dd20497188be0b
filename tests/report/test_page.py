"""The page: what it says, what it leaves out when a file is missing, and that nobody's name becomes markup."""

import json
import math
import re
from html import unescape
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from matplotlib.patches import FancyBboxPatch

from mergeflow.errors import MergeflowError
from mergeflow.merging.files.recipe import make_recipe
from mergeflow.training.trajectory import Cost
from tasks.project.recorded import sha256_of
from tasks.report import page, write_report
from tasks.report.files import read_run
from tasks.report.pictures import inline, lineage_figure
from tests.project_folder import change_params

from .conftest import draw, place

HOSTILE = "<script>alert('x')</script>\"&"


def written(root, name="report.html"):
    return write_report(root, root / "outputs" / name).read_text(encoding="utf-8")


def amend(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def amend_decision(root, **changes):
    path = root / "outputs/registration.json"
    amend(path, decision=json.loads(path.read_text())["decision"] | changes)


class Tags(HTMLParser):
    """Collects the tags of a page, and complains about what closes out of order."""

    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self, page):
        super().__init__()
        self.found, self.open = [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.slow
def test_the_page_is_whole_and_needs_no_network(finished):
    page = written(finished)
    tags = Tags(page).found
    addresses = [value for _, attributes in tags for key, value in attributes.items() if key in ("href", "src")]
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert "http://" not in page
    assert "https://" not in page
    assert sum(tag == "svg" for tag, _ in tags) == 6 + 1  # the figures and the lineage
    for words in ("Results", "The choice on validation", "Where it comes from", "Registry", "Cost", "Make it again"):
        assert words in page
    assert "rank_ratio 0.08, scale 1.5" in page
    assert "method: cart" in page
    assert "there is no champion yet" in page


@pytest.mark.parametrize(
    ("file", "place", "value"),
    [
        (".mergeflow/records/select.json", ["started"], "x"),
        (".mergeflow/records/finetune@digits.json", ["seconds"], None),
        ("outputs/experts/digits/training.json", ["settings"], []),
        ("outputs/registration.json", ["decision", "gates"], [{}]),
        ("outputs/results/geometry.json", ["relative_norm"], {"digits": "x"}),
        ("outputs/results/selection.json", ["individual"], {}),
        ("outputs/results/test.json", ["rows", 0, "name"], "x"),
        ("outputs/results/test.json", ["rows", 1, "mean"], math.nan),
        ("outputs/sweeps/cart.json", ["candidates"], []),
        ("outputs/sweeps/cart.json", ["candidates", 0, "accuracy"], {}),
        ("params.yaml", ["model"], []),
    ],
)
def test_a_damaged_file_is_an_error_that_says_so(finished, file, place, value):
    content = part = yaml.safe_load((finished / file).read_text())
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    (finished / file).write_text(json.dumps(content))
    words = r"is not what its stage wrote|lacks a task or a model of this run|is no mapping of sections"
    with pytest.raises(MergeflowError, match=rf"{Path(file).name} ({words})"):
        written(finished)


def test_a_fault_of_the_page_blames_no_file(finished, monkeypatch):
    monkeypatch.setattr(page, "lineage_table", lambda run: run.absent)
    with pytest.raises(AttributeError, match="absent"):
        written(finished)


def test_a_figure_that_was_cut_off_is_named(finished):
    figure = finished / "outputs/results/figures/radar.svg"
    figure.write_text(figure.read_text()[:-20])
    with pytest.raises(MergeflowError, match=r"radar\.svg is not what its stage wrote"):
        written(finished)


def test_a_flipped_bit_is_named(finished):
    """A figure whose digit is another one was shown without a word."""
    selection, manifest = finished / "outputs/results/selection.json", finished / ".mergeflow/manifests/select.json"
    manifest.parent.mkdir(exist_ok=True)
    outs = {"outputs/results/selection.json": sha256_of(selection)}
    manifest.write_text(json.dumps({"fingerprint": "", "outs": outs}))
    written(finished)
    selection.write_text(selection.read_text().replace("0.98", "0.88", 1))
    with pytest.raises(
        MergeflowError, match=r"the report would read what no stage has made.*\n.*selection.json: SHA-256"
    ):
        written(finished)


def test_the_recipe_on_the_page_is_one_that_merge_takes(finished):
    text = unescape(re.findall("<code>(method: .*?)</code>", written(finished), re.DOTALL)[0])
    recipe = make_recipe(yaml.safe_load(text))
    assert (recipe.method, recipe.call().scale, len(recipe.experts)) == ("cart", 1.5, 8)
    assert "# expert street: 000" in text
    assert "# the merge: abab" in text


def test_identifiers_are_unique_and_every_reference_finds_its_own(finished):
    page = written(finished)
    names = [attributes["id"] for _, attributes in Tags(page).found if "id" in attributes]
    assert len(names) == len(set(names))
    references = re.findall(r'(?:href="#|url\(#)([^")]+)', page)
    assert references
    assert set(references) <= set(names)


def test_figures_on_the_page_have_only_colours_that_follow_the_theme(finished):
    figures = re.findall('<div class="drawing" .*?</svg>', written(finished), re.DOTALL)
    assert len(figures) == 6
    for svg in figures:
        assert "var(--ink)" in svg
        assert not re.findall(r"#[0-9a-f]{6}\b", svg)


def test_the_same_files_give_the_same_bytes(finished):
    assert written(finished, "a.html") == written(finished, "b.html")


def test_the_embedded_suite_is_named_as_such(make_run):
    assert "must never be compared with the papers’ tables" in written(make_run())


def test_other_data_get_no_such_notice(make_run):
    assert "embedded suite" not in written(make_run(source="folder:inputs/photos"))


def test_everything_optional_may_be_missing(make_run):
    root = make_run(optional=False)
    (root / "outputs/results/geometry.json").unlink()
    for path in [*root.glob("outputs/experts/*/training.json"), *root.glob("outputs/sweeps/*.json")]:
        path.unlink()
    page = written(root)
    Tags(page)
    for words in ('id="registry"', 'id="cost"', 'id="figure-accuracy"', "<details", ">registered version<"):
        assert words not in page
    assert "base and experts" in page


def test_a_figure_other_than_the_accuracy_is_named_wherever_it_stands(make_run):
    root = make_run(["mood", "stars"])
    amend(root / "outputs/results/test.json", metrics={"stars": "spearman"})
    page = written(root)
    tables = 1 + len(json.loads((root / "outputs/results/selection.json").read_text())["methods"])
    assert page.count(">stars (spearman)<") == tables
    assert ">mood (" not in page


def test_the_standard_error_stands_where_every_task_is_judged_by_its_accuracy(make_run):
    root = make_run(["mood", "stars"])
    assert "One standard error of the winner’s mean is" in written(root)
    path = root / "outputs/results/test.json"
    path.write_text(path.read_text().replace('"stars": 0.', '"stars": -0.'))  # a correlation
    amend(path, metrics={"stars": "pearson"})
    assert "standard error" not in written(root)


def test_blocks_of_a_causal_model_have_no_standard_error_of_single_answers(make_run):
    root = make_run(["ships", "trees"])
    amend(root / "outputs/results/test.json", model={"modality": "causal"}, sources={})
    assert "standard error" not in written(root)


def test_base_data_and_seed_are_those_of_the_run_whatever_the_choices_say_by_now(make_run):
    root = make_run(["ships", "trees"])
    model, sources = {"modality": "vision", "pretrained": "ours"}, dict.fromkeys(["ships", "trees"], "suite:a")
    amend(root / "outputs/results/test.json", model=model, sources=sources)
    for task in sources:
        amend(root / f"outputs/experts/{task}/training.json", seed=41)
    before = written(root)
    for words in ("pretrained ours", "suite:a", ">41<", "seed 41"):
        assert words in before
    tasks = dict.fromkeys(["ships", "trees"], "folder:b")
    change_params(root, {"seed": 7, "model": {"modality": "toy"}, "tasks": tasks})
    assert written(root) == before


@pytest.mark.parametrize("changed", ["winner", "arguments", "tasks"])
def test_choices_that_are_newer_than_the_look_at_test_are_no_report(make_run, changed):
    root = make_run()
    path = root / "outputs/results/selection.json"
    selection = json.loads(path.read_text())
    if changed == "winner":
        selection["winner"] = "average"
    elif changed == "arguments":
        selection["methods"]["ties"]["args"]["scale"] = 9.5
    else:
        selection["tasks"].pop()
    path.write_text(json.dumps(selection))
    with pytest.raises(MergeflowError, match="are of two runs"):
        written(root)
    assert not (root / "outputs/report.html").exists()


def test_one_task_and_one_method(make_run):
    page = written(make_run(["digits"], {"average": {"scale": [1.0]}}))
    Tags(page)
    assert "merged from 1 expert<" in page
    assert "Over averaging" not in page


def test_a_choice_at_the_edge_of_the_grid_is_said(make_run):
    page = written(make_run(["a", "b"], {"task_arithmetic": {"scale": [0.5, 2.0]}}))
    assert '<span class="badge">grid edge</span>' in page
    assert '<span class="value">task_<wbr>arithmetic</span>' in page  # a tile breaks it there, not within a word
    assert "a better value may be outside: task_arithmetic (scale 2.0). Widen" in " ".join(page.split())


def test_a_refused_candidate_shows_the_reasons(make_run):
    root = make_run()
    amend(root / "outputs/registration.json", champion="7", aliases=["candidate"])
    amend_decision(root, promote=False, gates=[{"name": "margin", "passed": False, "reason": "no gain"}])
    page = written(root)
    assert "The gates refused it; the champion is version 7." in page
    assert "<strong>failed</strong>" in page
    assert "no gain" in page


def test_the_decision_is_drawn_against_what_is_allowed(make_run):
    root = make_run()
    assert 'id="figure-decision"' not in written(root)  # the first champion is compared with nothing
    numbers = {"gain": 0.012, "interval": [0.003, 0.027], "settings": {"tolerance": 0.05, "margin": 0.0}}
    amend_decision(root, numbers={**numbers, "change": {"digits": 0.02, "land": -0.061, "signs": 0.0}})
    page = written(root)
    Tags(page)
    picture = page.partition('id="figure-decision"')[2].partition("</svg>")[0]
    assert [text for text in ("+1.20", "+2.00", "−6.10", "+0.00", "allowed: −5.00") if text not in picture] == []
    assert picture.count('id="decision-worse"') == 1
    assert "<strong>Promoted.</strong>" in page


def test_boxes_of_the_lineage_do_not_lie_on_each_other(make_run):
    root = make_run()
    values = yaml.safe_load((root / "params.yaml").read_text())
    values["model"] |= {"layers": 12, "pooling": "mean", "head": "probed"}  # many lines about the base
    (root / "params.yaml").write_text(yaml.safe_dump(values))
    patches = lineage_figure(read_run(root)).axes[0].patches
    boxes = [patch.get_bbox().bounds for patch in patches if isinstance(patch, FancyBboxPatch)]
    assert len(boxes) == 2 * len(values["tasks"]) + 3
    for (x, y, width, height), (u, v, wide, high) in combinations(boxes, 2):
        assert x + width <= u or u + wide <= x or y + height <= v or v + high <= y


def test_the_lineage_says_what_the_registry_knows(make_run):
    root = make_run()
    environment = {"python": "3.11.7", "system": "Linux", "processor": "EPYC", "accelerator": None}
    lineage = {
        "git_commit": "3f2a9c7e51d0b8a64f1e with local changes",
        "run": {"id": "8d3b"},
        "environment": {**environment, "packages": {"torch": "2.9.1"}},
        "experts": [{"task": "digits", "regime": "lora", "seed": 7}],
        "missing": ["the run 77 of the expert 'land'"],
    }
    amend(root / "outputs/registration.json", lineage=lineage)
    page = unescape(written(root))
    for words in ("commit 3f2a9c7e51d0<", "3f2a9c7e51d0b8a64f1e with local changes", "8d3b", "lora · seed 7 · weights"):
        assert words in page
    assert "Python 3.11.7, Linux, EPYC, torch 2.9.1" in page
    assert "the run 77 of the expert 'land'" in page


def test_a_gpu_has_its_columns(make_run):
    root = make_run()
    assert "GPU seconds" not in written(root)
    cost = Cost(steps=10, examples=6400, seconds=10.0, gpu_seconds=9.5)
    amend(root / ".mergeflow/records/finetune@digits.json", training=cost.as_json())
    page = written(root)
    assert "GPU seconds" in page
    assert ">9.5<" in page
    assert ">640.0<" in page


def test_a_registration_without_a_decision_is_shown(make_run):
    root = make_run()
    amend(root / "outputs/registration.json", decision=None)
    assert "It was champion already" in written(root)


def test_hostile_names_stay_text(make_run, tmp_path):
    grids = {"cart": {"matrices": [HOSTILE], "scale": [0.5, 1.0, 2.0]}}
    root = make_run(["<b>bold</b>", "b"], grids, source=f"folder:{HOSTILE}")
    place(root, draw(root, tmp_path / "scratch"))
    record = json.loads((root / "outputs/registration.json").read_text())
    record["decision"]["gates"][0]["reason"] = record["model"] = HOSTILE
    (root / "outputs/registration.json").write_text(json.dumps(record))
    page = written(root)
    assert sum(tag == "script" for tag, _ in Tags(page).found) == 1
    assert "<b>" not in page
    assert "alert('x')</script>" not in page


def test_without_results_it_says_what_to_do_and_writes_nothing(tmp_path):
    with pytest.raises(MergeflowError, match=r"selection\.json is missing: run the pipeline first"):
        write_report(tmp_path, tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("outputs/results/geometry.json", b'{"tasks": [', r"geometry\.json is not what its stage wrote"),
        ("params.yaml", b"seed: 0\n# Fr\xfcchte\n", r"params\.yaml is not UTF-8 text: byte 0xfc in line 2"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(make_run, name, content, message):
    root = make_run()
    (root / name).write_bytes(content)
    with pytest.raises(MergeflowError, match=message):
        written(root)


def test_a_failed_write_leaves_the_old_page(make_run, monkeypatch):
    root = make_run()
    before = written(root)
    (root / "outputs/registration.json").unlink()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        written(root)
    assert (root / "outputs/report.html").read_text(encoding="utf-8") == before
    assert [path.name for path in root.glob("outputs/*.html*")] == ["report.html"]


def test_inlining_keeps_text_and_separates_identifiers():
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="9pt" '
        'viewBox="0 0 9 9">'
        '<metadata>x</metadata><defs><style>*{fill:red}</style><path id="m1" style="stroke: #1B1F27"/></defs>'
        '<g clip-path="url(#m1)"><use xlink:href="#m1"/><text>a &lt; b</text></g></svg>'
    )
    assert inline("one", svg) == (
        '<svg viewBox="0 0 9 9"><defs><path id="one-m1" style="stroke: var(--ink)" /></defs>'
        '<g clip-path="url(#one-m1)"><use href="#one-m1" /><text>a &lt; b</text></g></svg>'
    )
