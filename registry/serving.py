"""Serves one version over HTTP in this process."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn

from mergeflow.errors import MergeflowError
from registry.lookup import load
from registry.scoring import Limits, application
from registry.store import Store
from registry.versions import CHAMPION


def serve(
    store: Store,
    name: str,
    which: str | int = CHAMPION,
    host: str = "127.0.0.1",
    port: int = 5001,
    ready: Callable[[str], None] = lambda address: None,
    *,
    limits: Limits | None = None,
    foreign: bool = False,
) -> None:
    """Answer POST /invocations until the process is told to end.

    The body is {"dataframe_records": [{"task": name, the modality's columns}, ...]}, for images {"image": base64 of a
    PNG or JPEG file, "task": name}; the answer of a model that classifies is
    {"predictions": [{"label": ..., "probabilities": {class: probability}}, ...]}; bad rows give status 400 and one
    message that names them all, by their numbers. A request over the limits gets status 413.

    Args:
        store: the open registry.
        name: of the registered model.
        which: its number or an alias.
        host: address to listen on.
        port: port to listen on.
        ready: told the address once the model is loaded and the port is ours.
        limits: of one request; None: 32 MiB and 1024 rows.
        foreign: serve a version that another program registered, and so execute what lies in its files.

    Raises:
        MergeflowError: no such model, version or alias, its files cannot be read, or the port is taken.
    """
    with _bound(host, port) as listener:  # before the model, which may take long to load
        app = application(load(store, name, which, foreign=foreign), limits or Limits())
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
