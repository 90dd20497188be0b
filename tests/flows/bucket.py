"""A real server that speaks S3, with an empty bucket."""

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moto.server import ThreadedMotoServer


@contextmanager
def serve_bucket() -> Iterator[tuple["ThreadedMotoServer", dict[str, str]]]:
    """Serve s3://bucket from this process while the block runs; gives the environment by which clients find it."""
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()  # the server of another test is gone
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        address = f"http://{host}:{port}"
        for method, place in (("POST", "moto-api/reset"), ("PUT", "bucket")):  # what it has is the whole process's
            urllib.request.urlopen(urllib.request.Request(f"{address}/{place}", method=method))
        yield (
            server,
            {
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_ENDPOINT_URL": address,
                "AWS_EC2_METADATA_DISABLED": "true",
            },
        )
    finally:
        server.stop()
