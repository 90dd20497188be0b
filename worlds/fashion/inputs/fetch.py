"""Put Fashion-MNIST, as torchvision stores it, beside this file: python worlds/fashion/inputs/fetch.py

70,000 photographs of clothes by Zalando SE (Expat licence), out of Debian 12's package of them: apt-get downloads
31 MB of one version, checked by its SHA-256, into inputs/packages.
"""

import sys
from pathlib import Path

from mergeflow.data.packages import Package, contents, fetch
from mergeflow.errors import MergeflowError

PACKAGE = Package(
    "apt",
    "dataset-fashion-mnist",
    "0.0~git20200523.55506a9-1",
    "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
)


def fill(folder: Path) -> None:
    """Write the four files of images and labels into `torchvision/FashionMNIST/raw` of a folder."""
    raw = folder / "torchvision/FashionMNIST/raw"
    raw.mkdir(parents=True, exist_ok=True)
    for path, content in contents(fetch(PACKAGE, folder / "packages")):
        if path.endswith("-ubyte.gz"):
            (raw / Path(path).name).write_bytes(content)


if __name__ == "__main__":
    try:
        fill(Path(__file__).resolve().parent)
    except MergeflowError as error:
        sys.exit(str(error))
