"""CLIP models and the pocket-clip: loaded, checked, and their zero-shot heads."""

import json
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mergeflow.checkpoints import open_checkpoint
from mergeflow.data import load_split
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.late import Late
from mergeflow.modalities.classification import Classification, check_classes
from mergeflow.modalities.heads import Head
from mergeflow.modalities.modules import own_generator
from mergeflow.modalities.vision.tokenizer import WordTokenizer, knows_vocabulary
from mergeflow.modality import Network, check_fit
from mergeflow.schema import check_seed

if TYPE_CHECKING:
    import open_clip
else:
    open_clip = Late("open_clip")

POCKET = "pocket-clip"
ASSETS = Path(__file__).with_name("assets")
POCKET_MEAN, POCKET_STD = (110 / 255,) * 3, (65 / 255,) * 3

_CONFIGS = Path(__file__).with_name("configs")
_WRAPPERS = ("module.", "model.")  # what training wrappers put before every name


@dataclass(frozen=True)
class ClipModel:
    """A CLIP model and what goes with it.

    Args:
        tokenizer: list of N texts to ids, int64 [N, context].
        mean, std: of pixels in 0..1, per channel.
    """

    model: "open_clip.CLIP"
    tokenizer: Callable[[list[str]], Tensor]
    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def load_clip(
    architecture: str, pretrained: str | None = None, device: str | torch.device | None = None, seed: int = 0
) -> ClipModel:
    """Load a CLIP model.

    Args:
        architecture: any open_clip architecture (ViT-B-32, ViT-B-16, ViT-L-14, ...) or `pocket-clip`.
        pretrained: an open_clip tag of the architecture; the name of a shipped base (`pocket8`); the path of a local
            checkpoint, safetensors preferred, or of a folder that open_clip saved; None for random weights.
    """
    check_seed(seed)
    path = find_weights(architecture, pretrained)
    model = _create(architecture, pretrained if path is None else None, seed)
    if path is not None:
        _load_weights(model, path)
    pocket = architecture == POCKET
    shape = model.visual.preprocess_cfg
    return ClipModel(
        model=model.eval().to(torch.get_default_device() if device is None else device),
        tokenizer=WordTokenizer() if pocket else open_clip.get_tokenizer(architecture),
        image_size=model.visual.image_size[0],
        mean=POCKET_MEAN if pocket else tuple(shape["mean"]),
        std=POCKET_STD if pocket else tuple(shape["std"]),
    )


def find_weights(architecture: str, pretrained: str | None) -> Path | None:
    """Return the local file that `pretrained` means; None for a tag of open_clip or for no weights. None is read."""
    open_clip.add_model_config(_CONFIGS)
    if architecture not in open_clip.list_models():
        raise unknown_name("architecture", architecture, open_clip.list_models())
    tags = open_clip.list_pretrained_tags_by_model(architecture)
    if pretrained is None or pretrained in tags:
        if pretrained:
            _check_tag(architecture, pretrained)
        return None
    shipped = {path.stem.removesuffix("-base"): path for path in ASSETS.glob("*-base.safetensors")}
    if architecture == POCKET and pretrained in shipped:
        return shipped[pretrained]
    path = Path(pretrained)
    if path.is_dir():
        return _weights_in(path, architecture)
    if path.is_file():
        return path
    if path.suffix or path.parent != Path("."):
        raise MergeflowError(f"checkpoint {path} does not exist. Name an existing file or a pretrained tag.")
    raise unknown_name(
        f"pretrained tag of {architecture}", pretrained, [*tags, *(shipped if architecture == POCKET else ())]
    )


def image_size_of(architecture: str) -> int:
    """Return the side in pixels of the square images that an architecture of open_clip takes."""
    size = open_clip.get_model_config(architecture)["vision_cfg"].get("image_size", 224)
    return int(size if isinstance(size, int) else size[0])


def _weights_in(folder: Path, architecture: str) -> Path:
    """Return the file of weights in a folder that open_clip saved for this architecture."""
    from open_clip.constants import HF_CONFIG_NAME, HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME

    weights = [folder / name for name in (HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME) if (folder / name).is_file()]
    config = folder / HF_CONFIG_NAME
    if not config.is_file() or not weights:
        of_transformers = " of transformers" if (folder / "config.json").is_file() else ""
        raise MergeflowError(
            f"{folder} is a folder{of_transformers}; expected one that open_clip saved, with "
            f"{HF_CONFIG_NAME} and {HF_SAFE_WEIGHTS_NAME} or {HF_WEIGHTS_NAME}. Images take a CLIP of open_clip: "
            "such a folder, a file with its weights, or a tag; nearly every published CLIP has one. For an image model "
            "of transformers leave `architecture` out and write `head: probed`."
        )
    try:
        settings = json.loads(config.read_text("utf-8"))
        pixels, parts = settings.get("preprocess_cfg", {}), _decisive(settings["model_cfg"])
    except (ValueError, LookupError, AttributeError, TypeError):
        raise MergeflowError(
            f"{config} is not what open_clip writes: expected keys model_cfg and preprocess_cfg."
        ) from None
    if parts != _decisive(open_clip.get_model_config(architecture)):
        same = [name for name in open_clip.list_models() if _decisive(open_clip.get_model_config(name)) == parts]
        names = " or ".join(f"'{name}'" for name in same)
        raise MergeflowError(
            f"{config} is not of model.architecture '{architecture}': "
            + (f"it is {names}." if same else "no architecture of open_clip has its settings.")
        )
    _check_pixels(f"the weights in {folder}", pixels)
    return weights[0]


def _decisive(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the settings of the image tower in a configuration of open_clip's."""
    return config["embed_dim"], config["vision_cfg"], bool(config.get("quick_gelu"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep messages of open_clip, such as the one about random weights, off the terminal."""
    root, sink = logging.getLogger(), logging.NullHandler()  # without any handler logging would install one for good

    def foreign(record: logging.LogRecord) -> bool:
        return "open_clip" not in record.pathname

    root.addHandler(sink)
    root.addFilter(foreign)
    try:
        yield
    finally:
        root.removeFilter(foreign)
        root.removeHandler(sink)


def _create(architecture: str, tag: str | None, seed: int) -> Any:
    """Build the model, with the weights of a tag or random ones; leaves torch's generator as it was."""
    options = {"pretrained_text": False, "weights_only": True, "device": torch.get_default_device()}
    with _quiet(), own_generator(seed):
        try:
            return open_clip.create_model(architecture, pretrained=tag, **options)
        except (RuntimeError, OSError) as error:
            raise MergeflowError(
                f"cannot load {architecture} with pretrained '{tag}': {error}. "
                "Without a network, download the file elsewhere and give its path."
            ) from error


def _check_tag(architecture: str, tag: str) -> None:
    """Refuse a tag that needs more than the architecture's name says: experts are rebuilt from that name alone."""
    settings = open_clip.get_pretrained_cfg(architecture, tag)
    if settings.get("quick_gelu") and not architecture.endswith("-quickgelu"):
        raise MergeflowError(
            f"the weights '{tag}' of {architecture} were trained with QuickGELU: name the architecture "
            f"'{architecture}-quickgelu'."
        )
    _check_pixels(f"the weights '{tag}' of {architecture}", settings)


def _check_pixels(weights: str, settings: Mapping[str, Any]) -> None:
    """Refuse weights that expect other pixels than CLIP's."""
    for key, default in (("mean", open_clip.OPENAI_DATASET_MEAN), ("std", open_clip.OPENAI_DATASET_STD)):
        if tuple(settings.get(key) or default) != default:
            raise MergeflowError(
                f"{weights} expect pixels with {key} {settings[key]}, not CLIP's {default}; only CLIP's own "
                "preprocessing is supported: choose others."
            )


def _read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and metadata of a checkpoint file; never unpickles anything but tensors."""
    if path.suffix == ".safetensors":
        with open_checkpoint(path) as checkpoint:
            return {name: checkpoint[name] for name in checkpoint}, dict(checkpoint.metadata)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise MergeflowError(
            f"cannot read {path} as a checkpoint of plain tensors: {type(error).__name__}. It is truncated, or holds "
            "Python objects, which are never loaded. Convert it to safetensors where you trust it."
        ) from error
    state = loaded.get("state_dict", loaded) if isinstance(loaded, Mapping) else None
    if not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise MergeflowError(f"{path} holds no state dict: expected names with tensors, at the top or as 'state_dict'.")
    return dict(state), {}


def _load_weights(model: nn.Module, path: Path) -> None:
    """Load a file into the model, strictly."""
    state, record = _read_weights(path)
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in state):
            state = {name.removeprefix(wrapper): value for name, value in state.items()}
    if "vocabulary" in record and not knows_vocabulary(record["vocabulary"]):
        raise MergeflowError(
            f"{path} was trained with another vocabulary (SHA-256 {record['vocabulary'][:12]}..., not a beginning of "
            "this one's). Run the stage `pretrain` again, or restore the vocabulary file."
        )
    expected = model.state_dict()
    if not state.keys() & expected.keys():
        raise MergeflowError(
            f"{path} has no tensor of the architecture: its names are like '{next(iter(state), '')}', open_clip's like "
            f"'{next(iter(expected))}'. Give weights that open_clip saved, such as the file or folder of a tag."
        )
    check_fit(str(path), state, expected)
    model.load_state_dict(state)


def _pools_one_token(visual: Any) -> bool:
    """Return whether the tower is open_clip's plain ViT that reads the class token alone, its last block unobserved."""
    from open_clip.transformer import ResidualAttentionBlock, VisionTransformer

    if type(visual) is not VisionTransformer or visual.pool_type != "tok" or visual.attn_pool is not None:
        return False
    last = visual.transformer.resblocks[-1]
    return (
        type(last) is ResidualAttentionBlock
        and type(last.attn) is nn.MultiheadAttention
        and visual.proj is not None
        and not (visual.output_tokens or visual.transformer.grad_checkpointing)
        and not any(m._forward_hooks or m._forward_pre_hooks for m in (*last.modules(), visual, visual.transformer))
    )


def _pooled_token_only(visual: Any, pixels: Tensor) -> Tensor:
    """Compute the tower, in the last block for the class token alone: the others' outputs would be thrown away.

    Equal to `visual(pixels)` but for rounding; on pocket-clip a fifth faster in training, a quarter in evaluation.
    """
    tokens = visual._embeds(pixels)
    *blocks, last = visual.transformer.resblocks
    for block in blocks:
        tokens = block(tokens)
    keys = last.ln_1(tokens)
    token = tokens[:, :1] + last.ls_1(last.attn(keys[:, :1], keys, keys, need_weights=False)[0])
    token = token + last.ls_2(last.mlp(last.ln_2(token)))
    return visual._pool(token)[0] @ visual.proj


class ImageEncoder(nn.Module):
    """The image tower: uint8 images in, unit features out; its weights are what experts and merges hold.

    The tower is shared with the ClipModel that it is made from, not copied.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, clip: ClipModel) -> None:
        super().__init__()
        self.visual: Any = clip.model.visual
        self.width = int(self.visual.output_dim)
        device = next(clip.model.parameters()).device
        mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (clip.mean, clip.std))
        self.register_buffer("mean", 255 * mean, persistent=False)
        self.register_buffer("scale", 1 / (255 * std), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return unit features n(visual((images - mean) / std)), float32 [B, D], of uint8 images [B, S, S, 3].

        n(x) = x / ||x||.
        """
        pixels = self.normalised_pixels(images)
        pools_one = _pools_one_token(self.visual)
        features = _pooled_token_only(self.visual, pixels) if pools_one else self.visual(pixels)
        return nn.functional.normalize(features.float(), dim=-1)

    def normalised_pixels(self, images: Tensor) -> Tensor:
        """Return (images - mean) / std, float32 [B, 3, S, S], of uint8 images [B, S, S, 3], wherever these lie."""
        return (images.to(self.mean.device).permute(0, 3, 1, 2).float() - self.mean) * self.scale


def image_model(clip: ClipModel) -> Network:
    """Return the image tower of a CLIP model, which experts and merges hold; its weights are open_clip's `visual.*`."""
    return Network(ImageEncoder(clip))


@torch.no_grad()
def build_head(clip: ClipModel, class_names: Sequence[str], templates: Sequence[str]) -> Head:
    r"""Build a zero-shot head: for each class the mean of its prompts' text features.

    w_c = n(1/|P| Σ_p n(text(p(c)))) with n(x) = x / ||x||, p a template in which `{}` stands for the class name.
    """
    _check_prompts(class_names, templates)
    device = next(clip.model.parameters()).device
    clip.model.eval()
    rows = []
    for name in class_names:
        tokens = clip.tokenizer([template.replace("{}", name) for template in templates]).to(device)
        features = clip.model.encode_text(tokens).float()
        mean = torch.nn.functional.normalize(features, dim=-1).mean(dim=0)
        rows.append(torch.nn.functional.normalize(mean, dim=0))
    return Head(torch.stack(rows).cpu(), float(clip.model.logit_scale.exp()), list(class_names))


def _check_prompts(class_names: Sequence[str], templates: Sequence[str]) -> None:
    if not class_names or not templates:
        raise MergeflowError(
            f"a head needs at least one class and one template; found {len(class_names)} and {len(templates)}."
        )
    if twice := sorted({name for name in class_names if list(class_names).count(name) > 1}):
        raise MergeflowError(f"class names occur more than once: {', '.join(twice)}. Give every label its own name.")
    if bare := [template for template in templates if "{}" not in template]:
        raise MergeflowError(f"templates without a place for the class name: {bare}. Write {{}} where it belongs.")


def open_prepared(
    task: str, folder: Path, split: str, clip: ClipModel, head: Head | None, device: str
) -> Classification:
    """Return a prepared split of images, which stay on disk, after checking that model and head take it."""
    data, width = load_split(folder, split), clip.model.visual.output_dim
    if data.images.shape[1] != clip.image_size:
        raise MergeflowError(
            f"task '{task}': its images have {data.images.shape[1]} pixels a side, but the model takes "
            f"{clip.image_size}: prepare it again with that size."
        )
    check_classes(task, head, data.class_names, "Build the head from this data's class names.")
    if head is not None and head.weight.shape[1] != width:
        raise MergeflowError(
            f"task '{task}': the head takes features of {head.weight.shape[1]} numbers, the model gives {width}: "
            "use a head built with this architecture."
        )
    head = None if head is None else head.to(device)
    return Classification(task, torch.from_numpy(data.images), torch.from_numpy(data.labels).to(device), head)
