"""A release carries proof: stages that make the same bits by older and by new code are not run again."""

import shutil
from pathlib import Path

import pytest

from mergeflow.errors import MergeflowError
from tasks.running import release
from tasks.running.digests import meaning_of_functions
from tasks.running.release import check_release

ROOT = Path(__file__).parents[2]


def test_functions_and_what_is_outside_of_them_have_a_meaning_each() -> None:
    text = b"X = 1\nclass A:\n    def f(self):\n        return 1\ndef g():\n    raise ValueError('a b')\n"
    first = meaning_of_functions(text)
    assert set(first) == {"<module>", "A.f", "g"}
    second = meaning_of_functions(text.replace(b"return 1", b"return 2").replace(b"a b", b"c d"))
    assert {name for name in first if first[name] != second[name]} == {"A.f"}


def test_what_is_no_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MergeflowError, match="is not mergeflow"):
        check_release(tmp_path, tmp_path)


def test_other_bits_and_code_that_no_run_entered_are_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = tmp_path / "older", tmp_path / "newer"
    for home, text in ((older, "def f():\n    return 1\n"), (newer, "def f():\n    return 2\n")):
        (home / "tasks").mkdir(parents=True)
        (home / "tasks/x.py").write_text(text)
    monkeypatch.setattr(release, "HOME", newer)
    same, other, module = {"outputs/a": "0"}, {"outputs/a": "1"}, "tasks/x.py:<module>"

    def faults(outs: dict[str, str], *entered: str) -> list[str]:
        runs = [({"outs": outs}, {"entered": entered, "outs": same}, "toy x")]
        return list(release._faults(older, ["tasks/x.py"], runs))

    assert faults(same, module) == faults(same) == ["tasks/x.py:f has changed and no run entered it"]
    assert faults(same, module, "tasks/x.py:f") == []
    assert faults(other, module, "tasks/x.py:f") == ["toy x: outputs/a differs"]


@pytest.mark.nightly
def test_equal_bits_prove_what_was_run(tmp_path: Path) -> None:
    """The older code differs in a constant, in a line of a function that runs, and in one more function."""
    older = tmp_path / "older"
    for name in ("mergeflow", "tasks", "registry", "flows", "suites", "studies"):
        shutil.copytree(ROOT / name, older / name, ignore=shutil.ignore_patterns("__pycache__"))
    vectors, evaluate, figures = (older / f"tasks/{name}.py" for name in ("vectors", "evaluate", "figures"))
    vectors.write_text(vectors.read_text() + "\n_SPARE = 1\n")
    begin = "def run(io: StageIO) -> None:"
    evaluate.write_text(evaluate.read_text().replace(begin, f"{begin}\n    io.costs['x'] = 1", 1))
    figures.write_text(figures.read_text() + "\n\ndef _spare() -> None:\n    print()\n")
    (tmp_path / "runs").mkdir()
    proofs = {proof.stage: proof for proof in check_release(older, tmp_path / "runs", regimes=["steps"])}
    assert set(proofs) == {"vectors", "evaluate", "figures"}
    assert {proof.faults for proof in proofs.values()} == {()}
