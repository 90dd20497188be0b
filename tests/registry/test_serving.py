"""Serving: what goes wrong before the first answer is one error, and the address is told when it is true."""

import shutil
import socket

import pytest
from fastapi.testclient import TestClient

from mergeflow.errors import MergeflowError
from registry import serving
from registry.promotion import register
from registry.serving import serve


@pytest.fixture
def addresses(monkeypatch):
    """Addresses that were told, and /metrics, in a process whose server ends at once."""
    texts = []

    def run(server, sockets):
        texts.append(TestClient(server.config.app).get("/metrics").text)

    monkeypatch.setattr(serving.uvicorn.Server, "run", run)
    return texts


def test_the_address_is_told_when_model_and_port_are_there(store, make_candidate, addresses):
    register(store, "merged", make_candidate(1))

    def ready(version, address):
        assert version == "1"
        port = int(address.split(":")[2].split("/")[0])
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        addresses.append(address)

    serve(store, "merged", "candidate", port=0, ready=ready)
    address, metrics = addresses
    assert address.startswith("http://127.0.0.1:")
    assert 'mergeflow_serve_model_info{name="merged",version="1"} 1.0' in metrics


@pytest.mark.parametrize(
    ("name", "which", "words"),
    [
        ("mergd", "candidate", "did you mean 'merged'"),
        ("merged", "77", "unknown version or alias of 'merged' '77'"),
        ("merged", "candidate", "the files of version 1 of 'merged' cannot be read"),
    ],
)
def test_no_model_no_address(store, make_candidate, addresses, name, which, words):
    register(store, "merged", make_candidate(1))
    shutil.rmtree(store.client.get_model_version("merged", "1").source.removeprefix("file://"))
    with pytest.raises(MergeflowError, match=words):
        serve(store, name, which, port=0, ready=lambda *given: addresses.append(given))
    assert addresses == []


@pytest.mark.parametrize("token", ["sécret", "secret\n", " "])
def test_a_token_that_no_caller_can_show_is_refused(store, make_candidate, addresses, monkeypatch, token):
    register(store, "merged", make_candidate(1))
    monkeypatch.setenv("MERGEFLOW_SERVE_TOKEN", token)
    with pytest.raises(MergeflowError, match="MERGEFLOW_SERVE_TOKEN holds spaces"):
        serve(store, "merged", "candidate", port=0)
    assert addresses == []


@pytest.mark.slow
@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", None), ("192.0.2.1", 0), ("127.0.0.1", 99999)])
def test_a_port_that_cannot_be_had(store, make_candidate, addresses, host, port):
    register(store, "merged", make_candidate(1))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1] if port is None else port
        with pytest.raises(MergeflowError, match=f"cannot listen on {host}, port {port}.*--port"):
            serve(store, "merged", 1, host, port, lambda *given: addresses.append(given))
    assert addresses == []
