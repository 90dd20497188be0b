"""One reader for each real data set: a torchvision folder -> class names and the rows of every split."""

from collections.abc import Mapping

from mergeflow.modalities.vision.sources.torchvision_readers.eight import EIGHT
from mergeflow.modalities.vision.sources.torchvision_readers.fourteen import SIX_OF_FOURTEEN
from mergeflow.modalities.vision.sources.torchvision_readers.rows import Reader
from mergeflow.modalities.vision.sources.torchvision_readers.twenty import SIX_OF_TWENTY

READERS: Mapping[str, Reader] = {**EIGHT, **SIX_OF_FOURTEEN, **SIX_OF_TWENTY}
