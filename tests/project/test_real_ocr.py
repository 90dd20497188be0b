"""The world real-ocr: Tesseract's files are read and written to the bit, and its merges are judged by Tesseract."""

import importlib.util
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
import torch
import yaml

from tasks.project.new import new_project, worlds

INPUTS = worlds()["real-ocr"] / "inputs"


@pytest.fixture(scope="module")
def traineddata() -> ModuleType:
    spec = importlib.util.spec_from_file_location("traineddata", INPUTS / "traineddata.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def layer(kind: str, body: bytes, training: int = 2) -> bytes:
    """Return a layer as Tesseract writes it: kind, state, flags, sizes, name, and what is its kind's own."""
    return struct.pack(f"<bI{len(kind)}sbbIiiiI", 0, len(kind), kind.encode(), training, 0, 0, 3, 4, 0, 0) + body


def matrix(weights: torch.Tensor, scales: torch.Tensor | None = None) -> bytes:
    rows, columns = weights.shape
    if scales is None:
        return struct.pack("<Biid", 128, rows, columns, 0) + weights.double().numpy().tobytes()
    ending = struct.pack("<I", rows) + scales.double().numpy().tobytes()
    return struct.pack("<Biib", 129, rows, columns, 0) + weights.to(torch.int8).numpy().tobytes() + ending


def file_of(network: bytes) -> bytes:
    """Return a .traineddata file whose parts are the network and a version behind it."""
    head = struct.pack("<i19q", 19, *[-1] * 17, 4 + 19 * 8, 4 + 19 * 8 + len(network))
    return head + network + b"5.3"


def network(whole: torch.Tensor, gates: list[torch.Tensor], scales: torch.Tensor | None = None) -> bytes:
    reversed_lstm = layer(
        "RTLReversed",
        struct.pack("<I", 1) + layer("LSTM", struct.pack("<i", 2) + b"".join(matrix(gate, scales) for gate in gates)),
    )
    inside = (
        layer("Input", bytes(20)) + layer("Maxpool", bytes(8)) + reversed_lstm + layer("Softmax", matrix(whole, scales))
    )
    return layer("Series", struct.pack("<I", 4) + inside)


def test_weights_are_read_by_name_and_written_to_the_bit(traineddata: ModuleType) -> None:
    torch.manual_seed(0)
    whole, gates = torch.randn(3, 5).double(), [torch.randn(3, 4).double() for _ in range(4)]
    data = file_of(network(whole, gates))
    state = traineddata.read(data)
    assert list(state) == [*(f"layers.2.0.{gate}.weight" for gate in traineddata.GATES), "layers.3.weight"]
    assert torch.equal(state["layers.3.weight"], whole)
    assert torch.equal(state["layers.2.0.output.weight"], gates[3])
    other = {name: 2 * tensor for name, tensor in state.items()}
    written = traineddata.write(other, data)
    assert traineddata.write(state, written) == data
    assert all(torch.equal(tensor, other[name]) for name, tensor in traineddata.read(written).items())


def test_rounded_weights_are_integers_times_their_rows_scale(traineddata: ModuleType) -> None:
    whole, scales = torch.tensor([[127, -3], [5, 0]]), torch.tensor([0.5, 0.25])
    state = traineddata.read(file_of(network(whole, [whole] * 4, scales)))
    assert state["layers.3.weight"].tolist() == [[63.5, -1.5], [1.25, 0.0]]
    with pytest.raises(ValueError, match=r"layers.2.0.cell.weight: \(2, 2\) does not fit"):
        traineddata.write(state, file_of(network(whole, [whole] * 4, scales)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (struct.pack("<i19q", 19, *[-1] * 19), "no LSTM network"),
        (file_of(layer("Softmax", b"", training=1)), "to go on training from"),
        (file_of(layer("TensorFlow", b"")), "of the kind 'TensorFlow'"),
        (file_of(layer("Softmax", struct.pack("<Bii", 0, 1, 1))), "before 4.0"),
    ],
)
def test_other_files_are_refused(data: bytes, message: str, traineddata: ModuleType) -> None:
    with pytest.raises(ValueError, match=message):
        traineddata.read(data)


@pytest.mark.real
@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which("tesseract"), reason="needs Tesseract: apt-get install tesseract-ocr")
def test_tesseract_reads_more_with_a_merge_than_with_its_base(tmp_path: Path) -> None:
    root = new_project(tmp_path / "reader", "vision", "real-ocr")

    def run(*words: str) -> str:
        done = subprocess.run([sys.executable, *words], cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("inputs/make.py")
    for folder in root.glob("inputs/lines/*/*"):
        if folder.name not in ("courier-heavy", "libmono-heavy", "unseen-heavy"):
            shutil.rmtree(folder)
    sweep = yaml.safe_load((root / "sweep.yaml").read_text())
    sweep["methods"] = {"average": {}, "task_arithmetic": {"scale": [0.4]}}
    (root / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    run("-m", "mergeflow.cli", "sweep", "sweep.yaml")
    trials = pd.read_parquet(root / "sweeps/sweep/trials.parquet")
    assert set(trials["method"]) == {"average", "task_arithmetic"}
    table = {line.split()[0]: float(line.split()[-1]) for line in run("inputs/scorer.py").splitlines()[1:]}
    assert max(table["average"], table["task_arithmetic"]) < table["base"] - 3
