"""Serves one version over HTTP in this process, with MLflow's scoring server but without its search for programs."""

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn
from mlflow.pyfunc import scoring_server

from mergeflow.errors import MergeflowError
from registry.lookup import load
from registry.store import Store
from registry.versions import CHAMPION


def serve(
    store: Store,
    name: str,
    which: str | int = CHAMPION,
    host: str = "127.0.0.1",
    port: int = 5001,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Answer POST /invocations until the process is told to end.

    The body is {"dataframe_records": [{"task": name, the modality's columns}, ...]}, for images {"image": base64 of a
    PNG or JPEG file, "task": name}; the answer of a model that classifies is
    {"predictions": [{"label": ..., "probabilities": {class: probability}}, ...]}; bad rows give status 400 and one
    message that names them all.

    Args:
        store: the open registry.
        name: of the registered model.
        which: its number or an alias.
        host: address to listen on.
        port: port to listen on.
        ready: told the address once the model is loaded and the port is ours.

    Raises:
        MergeflowError: no such model, version or alias, its files cannot be read, or the port is taken.
    """
    # It warns at every start about an input format that our callers do not use.
    logging.getLogger(scoring_server.__name__).setLevel(logging.ERROR)
    with _bound(host, port) as listener:  # before the model, which may take long to load
        app = scoring_server.init(load(store, name, which))
        with _naming(host, port):
            listener.listen()
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{listener.getsockname()[1]}/invocations")
        with suppress(KeyboardInterrupt):
            uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """Give a socket that holds the port and refuses callers until it listens."""
    with _naming(host, port):
        family, kind, protocol, _, (place, _, *rest) = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    with listener:
        with _naming(host, port):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((place, port, *rest))
        yield listener


@contextmanager
def _naming(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except (OSError, OverflowError) as error:
        raise MergeflowError(
            f"the server cannot listen on {host}, port {port}: {error}. End what listens there, or choose another "
            "with --port or --host."
        ) from error
