"""The graph that both drivers read."""

from pathlib import Path

import pytest

from mergeflow.errors import MergeflowError
from tasks.project.graph import downstream_closure, find_stage, load_graph, removed_items, training_settings, upstream
from tasks.project.stage import Stage
from tasks.running.digests import CODE_STAGE

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "params.yaml").write_text("tasks: {a: x, b: y}\n")
    (tmp_path / "dvc.yaml").write_text(
        """
stages:
  last:
    cmd: last
    meta: {run: tasks.last}
    params: [{outputs/code.yaml: [last]}]
    deps: [made]
    outs: [end]
  each:
    foreach: ${tasks}
    do:
      cmd: each ${key}
      meta: {run: tasks.each}
      params: [{outputs/code.yaml: [each]}]
      deps: ["first/${key}.txt"]
      outs:
        - made/${key}: {persist: true}
  first:
    cmd: first
    meta: {run: tasks.first}
    params: [{outputs/code.yaml: [first]}]
    outs: [first]
  never:
    frozen: true
    cmd: never
    meta: {run: tasks.never}
    params: [{outputs/code.yaml: [never]}]
    outs: [nothing]
"""
    )
    return tmp_path


def test_a_stage_that_does_not_depend_on_its_code_is_refused(project: Path) -> None:
    text = (project / "dvc.yaml").read_text().replace("outputs/code.yaml: [last]", "outputs/code.yaml: [first]")
    (project / "dvc.yaml").write_text(text)
    with pytest.raises(MergeflowError, match=r"stage 'last' must .*add `- outputs/code.yaml: \[last\]`"):
        load_graph(project)


def test_order_and_items(project: Path) -> None:
    assert [*load_graph(project)] == ["first", "never", "each@a", "each@b", "last"]


def test_paths_inside_and_around_outputs_make_edges(project: Path) -> None:
    stages = load_graph(project)
    assert upstream(stages["each@a"], stages) == ["first"]
    assert set(upstream(stages["last"], stages)) == {"each@a", "each@b"}


def test_closure_holds_what_depends_and_no_more(project: Path) -> None:
    stages = load_graph(project)
    assert downstream_closure({"each@b"}, stages) == ["each@b", "last"]
    assert downstream_closure({"never"}, stages) == []


def test_removed_are_items_that_params_lacks_and_nothing_else(project: Path) -> None:
    removed = removed_items(project, ["each@a", "each@gone", "each@../a", "first", "last", "none@gone"])
    assert [stage.outs for stage in removed] == [("made/gone",)]


def test_wrong_names_get_the_nearest(project: Path) -> None:
    stages = load_graph(project)
    with pytest.raises(MergeflowError, match="did you mean 'first'"):
        find_stage(stages, "frist", None)
    with pytest.raises(MergeflowError, match="needs --item, one of: a, b"):
        find_stage(stages, "each", None)
    with pytest.raises(MergeflowError, match="Known: a, b"):
        find_stage(stages, "each", "zzz")


def test_a_cycle_is_named(project: Path) -> None:
    text = (project / "dvc.yaml").read_text().replace("outs: [first]", "deps: [end]\n    outs: [first]")
    (project / "dvc.yaml").write_text(text)
    with pytest.raises(MergeflowError, match="cycle"):
        load_graph(project)


def test_missing_or_broken_files_are_one_message(project: Path) -> None:
    (project / "params.yaml").write_text("tasks: [unclosed")
    with pytest.raises(MergeflowError, match=r"params.yaml is not valid YAML"):
        load_graph(project)
    (project / "params.yaml").write_text("tasks:\n  digits: {}\n  digits: {}\n")
    with pytest.raises(MergeflowError, match=r"params.yaml is not valid YAML: the key 'digits' .* lines 2 and 3"):
        load_graph(project)
    (project / "params.yaml").write_text("{}")
    with pytest.raises(MergeflowError, match="no such key"):
        load_graph(project)
    stage = Stage("finetune", "a", "work", ("finetune",), (), ())
    for finetune in ([1], 7, None, {}):
        assert training_settings(stage, {}, {"finetune": finetune}) == {}
    graph = (project / "dvc.yaml").read_text()
    for text in ("", "stages:\n", "[]", "stages: {a: }"):
        (project / "dvc.yaml").write_text(text)
        with pytest.raises(MergeflowError, match=r"dvc.yaml is no graph of stages"):
            load_graph(project)
    (project / "dvc.yaml").write_text(graph)
    (project / "params.yaml").unlink()
    with pytest.raises(MergeflowError, match=r"params.yaml is missing"):
        load_graph(project)


@pytest.mark.slow
def test_dvc_reads_our_graph_as_we_do() -> None:
    from dvc.dependency import ParamsDependency
    from dvc.repo import Repo

    with Repo(str(ROOT)) as repo:
        theirs = {
            stage.addressing: (
                {dep.def_path for dep in stage.deps if not isinstance(dep, ParamsDependency)},
                {out.def_path for out in stage.outs},
            )
            for stage in repo.index.stages
            if stage.path_in_repo == "dvc.yaml" and stage.addressing != CODE_STAGE
        }
    ours = {address: (set(stage.deps), set(stage.outs)) for address, stage in load_graph(ROOT).items()}
    assert ours == theirs


def test_test_images_are_read_by_one_stage() -> None:
    readers = [stage.name for stage in load_graph(ROOT).values() if any("data/test" in dep for dep in stage.deps)]
    assert readers == ["evaluate"]
