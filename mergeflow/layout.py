"""Where a project keeps what its stages make: every path below `outputs`, spelled here alone.

Paths are relative to the project folder, with `/` between names, as dvc.yaml has them. The stages, the registry and
the flows ask here; that they read the same files is why they agree. These are functions of names and not methods of a
project, because what they return is compared with dvc.yaml before a folder is put before it.

Example:
    >>> expert_model("digits"), split("train", "digits")
    ('outputs/experts/digits/model.safetensors', 'outputs/data/train/digits')
"""

OUTPUTS = "outputs"
CODE = f"{OUTPUTS}/code.yaml"
ACCEPTED = "accepted.yaml"  # in the project folder, for git: whose outputs of older code count
MODEL_FILE, HEAD_FILE, TRAINING_FILE, MANIFEST_FILE = (
    "model.safetensors",
    "head.safetensors",
    "training.json",
    "manifest.json",
)

DATA = f"{OUTPUTS}/data"
MANIFESTS = f"{DATA}/manifests"
BASE = f"{OUTPUTS}/base"
BASE_MODEL = f"{BASE}/{MODEL_FILE}"
HEADS = f"{BASE}/heads"
MULTITASK = f"{OUTPUTS}/multitask"
EXPERTS = f"{OUTPUTS}/experts"
VECTORS = f"{OUTPUTS}/vectors"
SWEEPS = f"{OUTPUTS}/sweeps"
MERGED = f"{OUTPUTS}/merged"

RESULTS = f"{OUTPUTS}/results"
GEOMETRY = f"{RESULTS}/geometry.json"
SELECTION = f"{RESULTS}/selection.json"
WINNER_SCORES = f"{RESULTS}/winner_validation.npz"
TEST = f"{RESULTS}/test.json"
METRICS = f"{RESULTS}/metrics.json"
FIGURES = f"{RESULTS}/figures"
SERIES = f"{RESULTS}/series"
REGISTRATION = f"{OUTPUTS}/registration.json"
REPORT = f"{OUTPUTS}/report.html"

STUDIES = f"{OUTPUTS}/studies"
FINETUNED = f"{OUTPUTS}/finetuned"


def split(name: str, task: str) -> str:
    """Return the folder of one prepared split (train, validation or test) of one task."""
    return f"{DATA}/{name}/{task}"


def manifest_folder(task: str) -> str:
    """Return the folder that holds a task's manifest alone, for the stages that read no examples."""
    return f"{MANIFESTS}/{task}"


def manifest(task: str) -> str:
    """Return a task's manifest: its classes, splits and digests."""
    return f"{manifest_folder(task)}/{MANIFEST_FILE}"


def head(task: str) -> str:
    """Return the file of the head that a task's training starts from; a frozen one stays as it is."""
    return f"{HEADS}/{task}.safetensors"


def expert(task: str) -> str:
    return f"{EXPERTS}/{task}"


def expert_model(task: str) -> str:
    """Return the file of an expert's weights, the part that is merged."""
    return f"{expert(task)}/{MODEL_FILE}"


def expert_head(task: str) -> str:
    """Return the file of the head that an expert is judged with; there is none where tasks need no head."""
    return f"{expert(task)}/{HEAD_FILE}"


def expert_training(task: str) -> str:
    """Return the record of an expert's training: settings, seed and trajectory."""
    return f"{expert(task)}/{TRAINING_FILE}"


def vector(task: str) -> str:
    return f"{VECTORS}/{task}.safetensors"


def sweep(method: str) -> str:
    return f"{SWEEPS}/{method}.json"


def merge(method: str) -> str:
    return f"{MERGED}/{method}.safetensors"


def study(name: str) -> str:
    return f"{STUDIES}/{name}"


def study_run(name: str) -> str:
    """Return the folder of a training run that studies share."""
    return f"{STUDIES}/runs/{name}"
