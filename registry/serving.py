"""One version behind HTTP, in this process: MLflow's scoring server, without its search for programs on the PATH."""

import logging

import uvicorn
from mlflow.pyfunc import scoring_server

from registry.lookup import load
from registry.store import Store
from registry.versions import CHAMPION


def serve(store: Store, name: str, which: str | int = CHAMPION, host: str = "127.0.0.1", port: int = 5001) -> None:
    """Answer POST /invocations until the process is told to end.

    The body is {"dataframe_records": [{"image": base64 of a PNG or JPEG file, "task": name}, ...]}, the answer
    {"predictions": [{"label": ..., "probabilities": {class: probability}}, ...]}; bad rows give status 400 and one
    message that names them all.

    Args:
        store: the open registry.
        name: of the registered model.
        which: its number or an alias.
        host: address to listen on.
        port: port to listen on.

    Raises:
        MergeflowError: no such model, version or alias.
    """
    # It warns at every start about an input format that our callers do not use.
    logging.getLogger(scoring_server.__name__).setLevel(logging.ERROR)
    app = scoring_server.init(load(store, name, which))
    uvicorn.run(app, host=host, port=port, log_level="warning")
