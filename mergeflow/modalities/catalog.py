"""The modalities by name, as far as models and examples go."""

from mergeflow.modality import Modality
from mergeflow.parts import Parts

MODALITIES = Parts("modality", Modality, "mergeflow.modalities", "modalities", "modality")
