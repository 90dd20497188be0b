"""The way of a model: registered once, candidate, champion, rolled back."""

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mergeflow.analysis.provable.criteria import Criterion
from mergeflow.errors import MergeflowError
from registry.artifacts import input_example
from registry.gates import Evidence, GateSettings
from registry.promotion import Force, Promotion, promote, register, repair, rollback
from registry.versions import (
    METHOD,
    REMOVED,
    compare,
    current,
    download,
    find_registered,
    find_version,
    head_files,
    history,
    list_models,
    list_versions,
    load,
    show,
)

from .conftest import CLASSES, make_evidence

GATES = GateSettings()


def champions(store, make_candidate, count):
    """Register versions, each better than the one before, and promote them one after the other."""
    for seed in range(1, count + 1):
        register(store, "merged", make_candidate(seed, 0.6 + seed / 10))
        promote(store, "merged", seed, GATES)


def test_first_is_champion_and_a_better_one_replaces_it(store, make_candidate):
    first = register(store, "merged", make_candidate(1, 0.7))
    assert (first.version, first.aliases, first.new) == ("1", ("candidate",), True)
    assert promote(store, "merged", 1, GATES).changed
    second = register(store, "merged", make_candidate(2, 0.9))
    assert promote(store, "merged", second.version, GATES).decision.promote
    now = current(store, "merged")
    assert now.champion.version == "2"
    assert now.champion.aliases == ("champion",)
    assert now.champion.metrics == {"normalised": 0.9}
    assert now.previous.version == "1"
    assert now.candidate is None


def test_a_worse_one_stays_candidate_with_reasons(store, make_candidate):
    register(store, "merged", make_candidate(1, 0.8))
    promote(store, "merged", 1, GATES)
    register(store, "merged", make_candidate(2, 0.7))
    answer = promote(store, "merged", 2, GATES)
    assert not answer.changed
    assert answer.champion == "1"
    assert any("normalised" in reason for reason in answer.decision.reasons)
    now = current(store, "merged")
    assert (now.champion.version, now.candidate.version) == ("1", "2")
    version = show(store, "merged", "candidate")
    assert version["decision"]["promote"] is False
    assert version["decision"]["against"] == "1"


@pytest.mark.slow
def test_registered_once_per_fingerprint(store, make_candidate):
    assert register(store, "merged", make_candidate(1)).new
    again = register(store, "merged", make_candidate(1))
    assert (again.version, again.new) == ("1", False)
    promote(store, "merged", 1, GATES)
    assert register(store, "merged", make_candidate(1)).aliases == ("champion",)
    assert len(list_versions(store, "merged")) == 1
    assert len(store.client.search_logged_models([store.experiment_id])) == 1
    assert find_registered(store, "merged", "fingerprint-1", ["signs", "digits"]).version == "1"
    assert find_registered(store, "merged", "fingerprint-1", ["signs"]) is None
    assert find_registered(store, "merged", "other", ["signs", "digits"]) is None


@pytest.mark.slow
def test_the_same_weights_for_other_tasks_are_another_version(store, make_candidate, tmp_path):
    both = make_candidate(1, 0.8)
    one_task = replace(both, files=replace(both.files, heads={"digits": both.files.heads["digits"]}))
    one_task = replace(one_task, evidence=make_evidence(0.8, ("digits",)), metrics={"normalised": 0.7})
    assert register(store, "merged", one_task).version == "1"
    promote(store, "merged", 1, GATES)
    added = register(store, "merged", both)
    assert (added.version, added.new, added.tasks) == ("2", True, ("digits", "signs"))
    assert set(head_files(download(store, "merged", 2, tmp_path / "two"))) == {"digits", "signs"}
    answer = promote(store, "merged", 2, GATES)  # judged on what both serve
    assert answer.changed
    assert answer.decision.numbers["shared_tasks"] == ["digits"]
    assert (register(store, "merged", one_task).version, register(store, "merged", both).version) == ("1", "2")
    assert "lacks tasks" in " ".join(promote(store, "merged", 1, GATES).decision.reasons)
    assert len(store.client.search_logged_models([store.experiment_id])) == 2


@pytest.mark.slow
def test_a_killed_upload_for_other_tasks_is_not_taken(store, make_candidate, monkeypatch):
    both = make_candidate(1)
    one_task = replace(both, evidence=make_evidence(0.8, ("digits",)))

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(store.client, "create_model_version", killed)
        with pytest.raises(KeyboardInterrupt):
            register(store, "merged", one_task)
    register(store, "merged", both)
    assert set(show(store, "merged", 1)["accuracy"]) == {"digits", "signs"}


def lose_files(store, version, inside=""):
    folder = Path(store.client.get_model_version("merged", version).source.removeprefix("file://"))
    (shutil.rmtree if (folder / inside).is_dir() else Path.unlink)(folder / inside)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["", "evidence", "artifacts/model/model.safetensors"])
def test_lost_files_are_registered_again_under_a_new_number(store, make_candidate, lost):
    register(store, "merged", make_candidate(1))
    promote(store, "merged", 1, GATES)
    lose_files(store, "1", lost)
    assert find_registered(store, "merged", "fingerprint-1", ["digits", "signs"]) is None
    again = register(store, "merged", make_candidate(1))
    assert (again.version, again.new) == ("2", True)
    assert register(store, "merged", make_candidate(1)).version == "2"
    assert find_registered(store, "merged", "fingerprint-1", ["digits", "signs"]).version == "2"
    assert promote(store, "merged", 2, GATES, force=Force("ada", "the disk died")).champion == "2"
    assert load(store, "merged").predict(input_example(make_candidate(1).files)).shape == (1, 2)
    assert [event.version for event in history(store, "merged")] == ["1", "2"]


@pytest.mark.slow
def test_a_withdrawn_model_does_not_come_back_under_a_new_number(store, make_candidate):
    champions(store, make_candidate, 2)
    rollback(store, "merged")
    lose_files(store, "2")
    assert register(store, "merged", make_candidate(2, 0.8)).version == "3"
    assert "rollback" in " ".join(promote(store, "merged", 3, GATES).decision.reasons)


def test_a_withdrawn_version_returns_only_by_force(store, make_candidate):
    champions(store, make_candidate, 2)
    rollback(store, "merged", who="ada", why="complaints")
    refused = promote(store, "merged", 2, GATES)
    assert not refused.changed
    assert any("rollback" in reason for reason in refused.decision.reasons)
    assert promote(store, "merged", 2, GATES, force=Force("ada", "complaints were wrong")).changed
    last = history(store, "merged")[-1]
    assert (last.action, last.who, last.why, last.version) == ("force", "ada", "complaints were wrong", "2")
    assert rollback(store, "merged").version == "1"


def test_no_rollback_returns_to_a_version_that_one_took_out(store, make_candidate):
    for seed in (1, 2):
        register(store, "merged", make_candidate(seed, 0.6 + seed / 10))
    for version in (1, 2, 1):
        promote(store, "merged", version, GATES, force=Force("ada", "to and fro"))
    assert rollback(store, "merged").version == "2"
    with pytest.raises(MergeflowError, match="no earlier champion"):
        rollback(store, "merged")


@pytest.mark.slow
def test_an_alias_moved_by_hand_is_adopted(store, make_candidate):
    for seed in (1, 2, 3):
        register(store, "merged", make_candidate(seed, 0.6 + seed / 10))
    promote(store, "merged", 1, GATES)
    store.client.set_registered_model_alias("merged", "champion", "3")
    assert current(store, "merged").champion.version == "3"
    state = repair(store, "merged")
    assert (state.champion, state.line) == ("3", ("1",))
    assert [event.action for event in history(store, "merged")] == ["promote", "outside"]
    assert rollback(store, "merged").version == "1"


def test_a_lost_alias_or_a_deleted_champion_is_made_good(store, make_candidate):
    champions(store, make_candidate, 2)
    store.client.delete_registered_model_alias("merged", "champion")
    assert repair(store, "merged").champion == "2"
    assert find_version(store, "merged", "champion").version == "2"
    store.client.delete_model_version("merged", "2")
    assert repair(store, "merged").champion == "1"
    assert find_version(store, "merged", "@champion").version == "1"


@pytest.mark.parametrize("gone", ["version", "alias"])
def test_a_rollback_restores_a_champion_that_was_deleted_and_stops(store, make_candidate, gone):
    champions(store, make_candidate, 3)
    if gone == "version":
        store.client.delete_model_version("merged", "3")
    else:
        store.client.delete_registered_model_alias("merged", "champion")
    expected = "2" if gone == "version" else "3"
    with pytest.raises(MergeflowError, match=f"`mergeflow registry rollback` makes version {expected} champion again"):
        find_version(store, "merged", "champion")
    assert rollback(store, "merged", who="ada", why="it was deleted").version == expected
    assert find_version(store, "merged", "champion").version == expected
    last = history(store, "merged")[-1]
    if gone == "version":
        assert (last.action, last.version, last.before, last.who, last.why) == (
            "rollback",
            "2",
            "3",
            "ada",
            "it was deleted",
        )
    assert rollback(store, "merged").version == str(int(expected) - 1)


def test_compare_and_list(store, make_candidate):
    champions(store, make_candidate, 2)
    rows = compare(store, "merged", 1, "champion")["accuracy"]
    assert rows["digits"]["change"] == pytest.approx(0.1)
    assert [model.name for model in list_models(store)] == ["merged"]


def test_decision_is_logged_with_the_run(store, make_candidate):
    run = store.client.create_run(store.experiment_id).info.run_id
    register(store, "merged", make_candidate(1, run_id=run))
    promote(store, "merged", 1, GATES)
    files = [file.path for file in store.client.list_artifacts(run, "decisions")]
    assert files == ["decisions/merged-v1-against-vnone.json"]
    assert store.client.get_run(run).data.metrics == {"normalised": 0.8}


def test_weights_that_come_back_are_judged_by_what_is_known_of_them_now(store, make_candidate):
    run = store.client.create_run(store.experiment_id).info.run_id
    register(store, "merged", make_candidate(1, 0.7))
    promote(store, "merged", 1, GATES)
    register(store, "merged", make_candidate(2, 0.6, run_id=run))
    assert not promote(store, "merged", 2, GATES).changed

    def on_new_data(accuracy: float) -> Evidence:
        return replace(make_evidence(accuracy), digests=dict.fromkeys(CLASSES, "new"))

    back = replace(make_candidate(2), evidence=on_new_data(0.9))
    assert not register(store, "merged", back).new

    def promoted(evidence: Evidence | None) -> Promotion:
        return promote(
            store,
            "merged",
            2,
            GATES,
            evidence=evidence,
            reevaluate=lambda _: on_new_data(0.7),
            only_ask=evidence is None,
        )

    assert not promoted(None).decision.promote
    assert promoted(back.evidence).changed
    decision = store.client.list_artifacts(run, "decisions")[0].path
    document = json.loads(Path(store.client.download_artifacts(run, decision)).read_text())
    assert document["judged_by"] == {
        "accuracy": back.evidence.accuracy,
        "digests": {"digits": "new", "signs": "new"},
    }


def test_bounds_are_those_that_a_version_was_registered_with(store, make_candidate):
    first = replace(make_evidence(0.8), criteria=[Criterion("cars", False, "accuracy", 0.3, 0.2)])
    register(store, "merged", replace(make_candidate(1), evidence=first))
    now = replace(first, criteria=[Criterion("cars", False, "accuracy", 0.25, 0.9)])
    reasons = promote(store, "merged", 1, GATES, evidence=now).decision.reasons
    assert reasons == ["cars must be forgotten: its accuracy is 25.00 %, at most 20.00 % was asked for"]


def test_new_evidence_does_not_stand_for_lost_files(store, make_candidate):
    register(store, "merged", make_candidate(1))
    lose_files(store, "1")
    for evidence in (None, make_evidence(0.9)):
        with pytest.raises(MergeflowError, match="no readable evidence"):
            promote(store, "merged", 1, GATES, evidence=evidence)
    assert current(store, "merged").champion is None


def test_a_version_whose_run_was_deleted_for_good_is_promoted(store, make_candidate):
    run = store.client.create_run(store.experiment_id).info.run_id
    register(store, "merged", make_candidate(1, run_id=run))
    store.client.delete_run(run)
    store.client._tracking_client.store._hard_delete_run(run)  # what `mlflow gc` does
    assert promote(store, "merged", 1, GATES).changed
    assert show(store, "merged", 1)["decision"]["promote"] is True


def test_show_tells_recipe_tasks_and_parent(store, make_candidate):
    candidate = make_candidate(1, tags={REMOVED: '["cars"]', METHOD: "ties"})
    parent = {"model": "merged", "version": "7", "task": "cars"}
    documents = {**candidate.files.documents, "provenance": {"kind": "unmerge", "parent": parent}}
    register(store, "merged", replace(candidate, files=replace(candidate.files, documents=documents)))
    version = show(store, "merged", 1)
    assert (version["method"], version["recipe"], version["tasks"]) == ("ties", {"method": "ties"}, ["digits", "signs"])
    assert (version["kind"], version["parent"], version["removed_tasks"]) == ("unmerge", parent, ["cars"])
    listed = list_versions(store, "merged")[0]
    assert (listed.method, listed.tasks) == ("ties", ("digits", "signs"))


def test_errors_name_the_nearest(store, make_candidate):
    register(store, "merged", make_candidate(1))
    with pytest.raises(MergeflowError, match="did you mean 'merged'"):
        promote(store, "mergd", 1, GATES)
    with pytest.raises(MergeflowError, match="did you mean 'candidate'"):
        find_version(store, "merged", "candidat")
    with pytest.raises(MergeflowError, match="unknown version"):
        promote(store, "merged", 7, GATES)
    with pytest.raises(MergeflowError, match="letters, digits"):
        register(store, "a/b", make_candidate(1))
    with pytest.raises(MergeflowError, match="who and why"):
        Force("ada", " ")
    assert current(store, "nothing").champion is None


@pytest.mark.slow
def test_a_champion_with_lost_files_is_replaced_by_force_alone(store, make_candidate):
    for seed in (1, 2):
        register(store, "merged", make_candidate(seed, 0.6 + seed / 10))
    promote(store, "merged", 1, GATES)
    shutil.rmtree(store.client.get_model_version("merged", "1").source.removeprefix("file://"))
    refused = promote(store, "merged", 2, GATES)
    assert not refused.changed
    assert "no readable evidence" in " ".join(refused.decision.reasons)
    assert "mergeflow registry promote merged/2 --force" in " ".join(refused.decision.reasons)
    with pytest.raises(MergeflowError, match="version 1 of 'merged' cannot be read"):
        load(store, "merged")
    assert promote(store, "merged", 2, GATES, force=Force("ada", "the disk of the first died")).champion == "2"
    with pytest.raises(MergeflowError, match="no readable evidence"):
        rollback(store, "merged")


def test_files_come_back_as_they_were_registered(store, make_candidate, tmp_path):
    candidate = make_candidate(1)
    register(store, "merged", candidate)
    folder = download(store, "merged", "candidate", tmp_path / "again")
    assert (folder / "model.safetensors").read_bytes() == candidate.files.weights.read_bytes()
    assert not (folder / "model.safetensors").is_symlink()
    assert json.loads((folder / "recipe.json").read_text()) == {"method": "ties"}
    assert not any((tmp_path / ".mergeflow/registry").iterdir())


def test_a_full_disk_registers_nothing(store, make_candidate, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("registry.promotion.save_pyfunc", full)
    with pytest.raises(MergeflowError, match="No space left on device"):
        register(store, "merged", make_candidate(1))
    assert list_models(store) == []
