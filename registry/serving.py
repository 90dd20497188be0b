"""Serve one version over HTTP, with a token, metrics and a line in the log for each request.

Bodies, rows and nesting have limits, and no answer repeats what a caller has sent.
"""

import asyncio
import hmac
import io
import json
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pandas as pd
import uvicorn
from fastapi import FastAPI, Request, Response
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import scoring_server
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, Info, generate_latest

from mergeflow.errors import MergeflowError
from registry.store import Store
from registry.versions import CHAMPION, find_stored, load

_FORMATS = sorted(scoring_server.SUPPORTED_FORMATS)
_LOG = logging.getLogger(__name__)
TOKEN = "MERGEFLOW_SERVE_TOKEN"  # the variable that holds what callers have to show
_PROBES = ("/ping", "/health", "/ready")
_PATHS = (*_PROBES, "/invocations", "/metrics")


@dataclass(frozen=True)
class Limits:
    body: int = 32 * 2**20  # bytes of a request
    rows: int = 1024  # examples of a request


class Refused(Exception):
    """A request that cannot be answered: its HTTP status and the message to the caller."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def application(model: Any, limits: Limits, token: str = "", **served: str) -> FastAPI:
    """Build the server's application.

    POST /invocations is answered as MLflow's scoring server does; GET /ping, /health and /ready say that the model is
    loaded; GET /metrics has figures for Prometheus.

    Args:
        token: what callers have to send as `Authorization: Bearer TOKEN`, except to probes; empty: nothing.
    """
    app = FastAPI(openapi_url=None)
    turns = asyncio.Semaphore(os.cpu_count() or 1)  # requests that are read and computed at once
    registry = CollectorRegistry()
    labels = ("path", "status")
    requests = Counter("mergeflow_serve_requests", "Requests by path and status.", labels, registry=registry)
    seconds = Histogram("mergeflow_serve_seconds", "Seconds from request to answer.", registry=registry)
    Info("mergeflow_serve_model", "The registered model that answers.", registry=registry).info(served)

    @app.middleware("http")
    async def watched(request: Request, follow: Callable[[Request], Awaitable[Response]]) -> Response:
        started, status, path = time.perf_counter(), 500, request.url.path
        try:
            response = await follow(request) if path in _PROBES or _is_allowed(request, token) else _unauthorised()
            status = response.status_code
            return response
        finally:
            took = time.perf_counter() - started
            requests.labels(path if path in _PATHS else "other", status).inc()
            if path == "/invocations":
                seconds.observe(took)
            _print_access(request, status, took)

    for probe in _PROBES:
        app.get(probe)(lambda: Response("\n", media_type="application/json"))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.post("/invocations")
    async def invocations(request: Request) -> Response:
        try:
            body = await _body(request, limits)
            async with turns:
                text = await asyncio.to_thread(answer, model, body, request.headers.get("content-type", ""), limits)
        except Refused as refused:
            return _refusal(refused.status, "BAD_REQUEST", str(refused))
        return Response(text, media_type="application/json")

    return app


def _refusal(status: int, code: str, message: str, **headers: str) -> Response:
    text = json.dumps({"error_code": code, "message": message})
    return Response(text, status, media_type="application/json", headers=headers)


def _unauthorised() -> Response:
    message = f"send the header `Authorization: Bearer TOKEN` with the token that the server has in {TOKEN}."
    return _refusal(401, "UNAUTHENTICATED", message, **{"WWW-Authenticate": "Bearer"})


def _is_allowed(request: Request, token: str) -> bool:
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    return not token or (scheme.lower() == "bearer" and hmac.compare_digest(shown.strip().encode(), token.encode()))


def _print_access(request: Request, status: int, seconds: float) -> None:
    """Write one line about a request to stderr; what a caller sent stands in it without line breaks and shortened."""
    caller = request.client.host if request.client else "-"
    path = request.scope.get("raw_path", b"-").decode("ascii", "backslashreplace")[:200]
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    print(f"{now} {caller} {request.method} {path} {status} {1000 * seconds:.1f} ms", file=sys.stderr, flush=True)


async def _body(request: Request, limits: Limits) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limits.body:
            raise Refused(413, f"the body is larger than {limits.body} bytes: send fewer rows at once.")
    return bytes(body)


def answer(model: Any, body: bytes, content_type: str, limits: Limits) -> str:
    """Answer a body, as JSON.

    Args:
        body: JSON in one of MLflow's formats, or CSV.
        content_type: says which.

    Raises:
        Refused: with a 4xx status for a body that cannot be read, and 500 for a fault of the model's.
    """
    rows = _rows(model, body, content_type, limits)
    output = io.StringIO()
    try:
        scoring_server.predictions_to_json(model.predict(rows), output)
    except MergeflowError as error:
        raise Refused(400, str(error)) from None
    except (MlflowException, UnicodeError) as error:  # MLflow's repeat the rows
        _LOG.debug("refused", exc_info=error)
        raise Refused(400, _misfit(model)) from None
    except Exception:
        _LOG.exception("the model failed")
        raise Refused(500, "the model failed on these rows; the server's log has the traceback.") from None
    return output.getvalue()


def _rows(model: Any, body: bytes, content_type: str, limits: Limits) -> Any:
    kind, *options = (part.strip().lower().replace('"', "") for part in content_type.split(";"))
    if kind not in ("application/json", "text/csv") or set(options) - {"", "charset=utf-8", "charset=utf8"}:
        raise Refused(415, "the content type is not one that is read: send application/json, or text/csv, in UTF-8.")
    schema = model.metadata.get_input_schema()
    try:
        if kind == "text/csv":
            types = dict(zip(schema.input_names(), schema.pandas_types(), strict=True)) if schema else None
            as_it_is = {"keep_default_na": False, "na_values": [""]}  # `NA` and `null` are texts too
            text = body.decode()
            rows: Any = pd.read_csv(io.StringIO(text), dtype=types, nrows=limits.rows + 1, **as_it_is)
            if pd.read_csv(io.StringIO(text), header=None, nrows=1, dtype=str).T.duplicated().any():
                raise ValueError("a column comes twice")
            if not isinstance(rows.index, pd.RangeIndex):
                raise ValueError("rows have more cells than there are columns, and pandas took the first for names")
            _check_count(len(rows), limits)
            return _with_columns(rows, schema) if schema else rows
        values = json.loads(body)
        _check_count(_count(values), limits)
        named = schema is not None and not schema.is_tensor_spec()
        return (
            _with_columns(_frame(values, schema), schema)
            if named
            else scoring_server.infer_and_parse_data(values, schema)
        )
    except RecursionError:
        raise Refused(400, "the JSON is nested too deep.") from None
    except (MlflowException, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        _LOG.debug("refused", exc_info=error)
        raise Refused(400, _misfit(model)) from None


def _with_columns(rows: pd.DataFrame, schema: Any) -> pd.DataFrame:
    """Return rows that there are, with the columns that the model needs."""
    if rows.empty:
        raise Refused(400, "the body has no rows: send one at least.")
    if missing := [name for name in schema.required_input_names() if name not in rows]:
        lacking = " and no column ".join(map(repr, missing))
        raise Refused(400, f"the rows have no column {lacking}. {_wanted(schema)}")
    return rows


def _frame(values: Mapping[str, Any], schema: Any) -> pd.DataFrame:
    """Return rows as a table, whose texts the model reads itself; only numbers take the type that it wants."""
    (rows,) = (values[form] for form in _FORMATS if form in values)
    frame = pd.DataFrame(rows["data"], columns=rows["columns"]) if "dataframe_split" in values else pd.DataFrame(rows)
    numbers = {
        column.name: "float64" for column in schema.inputs if column.type.name == "double" and column.name in frame
    }
    return frame.astype(numbers)


def _count(values: Any) -> int:
    """Return how many rows a JSON value in one of MLflow's formats has."""
    forms = sorted(set(values) & set(_FORMATS)) if isinstance(values, Mapping) else []
    if len(forms) != 1:
        raise ValueError("no format, or several")
    form, rows = forms[0], values[forms[0]]
    if form == "dataframe_split":
        rows = rows["data"]
    if isinstance(rows, Mapping):
        return max((len(column) for column in rows.values() if isinstance(column, list | dict)), default=0)
    return len(rows)


def _check_count(count: int, limits: Limits) -> None:
    if count > limits.rows:
        raise Refused(413, f"the body has more than {limits.rows} rows: send fewer at once.")


def _misfit(model: Any) -> str:
    return (
        f"the body cannot be read as rows: send a JSON object with one of the keys {', '.join(_FORMATS)}, or CSV with "
        f"a header. {_wanted(model.metadata.get_input_schema())}"
    )


def _wanted(schema: Any) -> str:
    columns = ", ".join(f"{column.name} ({column.type.name})" for column in schema.inputs) if schema else ""
    return f"The columns are {columns or 'those of the model'}."


def serve(
    store: Store,
    name: str,
    which: str | int = CHAMPION,
    host: str = "127.0.0.1",
    port: int = 5001,
    ready: Callable[[str, str], None] = lambda version, address: None,
    *,
    limits: Limits | None = None,
    foreign: bool = False,
) -> None:
    """Answer POST /invocations until the process ends.

    The body is {"dataframe_records": [{"task": name, the modality's columns}, ...]}, for images {"image": base64 of a
    PNG or JPEG file, "task": name}; the answer of a model that classifies is
    {"predictions": [{"label": ..., "probabilities": {class: probability}}, ...]}; bad rows give status 400 and one
    message that names them all, by their numbers. A request over the limits gets status 413; one without the token that
    the environment's MERGEFLOW_SERVE_TOKEN holds, where it is set, status 401.

    Args:
        ready: told the version and the address once the model is loaded and the port is ours.
        limits: of one request; None: 32 MiB and 1024 rows.
        foreign: serve a version that another program registered, and so execute what lies in its files.
    """
    token = os.environ.get(TOKEN, "")
    if not re.fullmatch(r"[!-~]*", token):
        raise MergeflowError(
            f"{TOKEN} holds spaces, line ends or letters beyond ASCII, which no header carries as they are: choose "
            "another of letters and digits."
        )
    with _bound(host, port) as listener:  # before the model, which may take long to load
        number = str(find_stored(store, name, which).version)  # an alias may move while it is served
        model = load(store, name, number, foreign=foreign)
        app = application(model, limits or Limits(), token, name=name, version=number)
        with _naming(host, port):
            listener.listen()
        shown = f"[{host}]" if ":" in host else host
        ready(number, f"http://{shown}:{listener.getsockname()[1]}/invocations")
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
