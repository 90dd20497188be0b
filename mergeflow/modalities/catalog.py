"""The modalities by name, as far as models and examples go."""

from mergeflow.modality import Modality
from mergeflow.plugins import Parts

MODALITIES = Parts("modality", Modality, "mergeflow.modalities", "modalities", "modality")
