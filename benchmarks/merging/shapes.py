"""Shapes of CLIP image towers and decoders, and random checkpoints that have them."""

from pathlib import Path

import torch

from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.header import BFLOAT16, FLOAT32, TensorInfo
from mergeflow.checkpoints.writer import StreamWriter

# name: width, layers, patch, image side, output
TOWERS = {
    "ViT-B-32": (768, 12, 32, 224, 512),
    "ViT-B-32-2": (768, 2, 32, 224, 512),  # two of its twelve blocks
    "ViT-L-14": (1024, 24, 14, 224, 768),
    "tiny": (64, 3, 8, 32, 32),
}


# name: width, layers, intermediate, words
DECODERS = {
    "Llama-3.2-1B": (2048, 16, 8192, 128256),
    "Llama-3.2-1B-2": (2048, 2, 8192, 32000),  # two of its sixteen layers, a quarter of its words
    "decoder-8B-1": (4096, 1, 14336, 128256),  # one of the 32 layers of Llama 3's 8 B, both its tables of words
    "decoder-memory": (1024, 1, 4096, 32768),  # tables eight times as large as the largest matrix
    "tiny-decoder": (32, 2, 64, 64),
}
MODELS = [*TOWERS, *DECODERS]


def shapes_of(name: str) -> dict[str, TensorInfo]:
    """Return names, shapes and types of a model's tensors."""
    return decoder(name) if name in DECODERS else tower(name)


def decoder(name: str) -> dict[str, TensorInfo]:
    """Return names and shapes of a decoder in Llama's layout, bfloat16."""
    width, layers, inner, words = DECODERS[name]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, width)}
    if not name.startswith("Llama-3.2"):  # its head is its embedding
        shapes["lm_head.weight"] = (words, width)
    shapes["model.norm.weight"] = (width,)
    for layer in range(layers):
        block = f"model.layers.{layer}"
        heads = 512 if name.startswith("Llama-3.2") else width  # of keys and values
        shapes |= {f"{block}.self_attn.{part}_proj.weight": (width, width) for part in "qo"}
        shapes |= {f"{block}.self_attn.{part}_proj.weight": (heads, width) for part in "kv"}
        shapes |= {f"{block}.mlp.{part}_proj.weight": (inner, width) for part in ("gate", "up")}
        shapes[f"{block}.mlp.down_proj.weight"] = (width, inner)
        shapes |= {f"{block}.{norm}_layernorm.weight": (width,) for norm in ("input", "post_attention")}
    return {key: TensorInfo(shape, BFLOAT16) for key, shape in sorted(shapes.items())}


def tower(name: str) -> dict[str, TensorInfo]:
    """Return names and shapes of an image tower in open_clip's layout, float32."""
    width, layers, patch, side, output = TOWERS[name]
    shapes: dict[str, tuple[int, ...]] = {
        "visual.class_embedding": (width,),
        "visual.positional_embedding": ((side // patch) ** 2 + 1, width),
        "visual.proj": (width, output),
        "visual.conv1.weight": (width, 3, patch, patch),
        "logit_scale": (),
    }
    for norm in ("ln_pre", "ln_post"):
        shapes[f"visual.{norm}.weight"] = shapes[f"visual.{norm}.bias"] = (width,)
    for layer in range(layers):
        block = f"visual.transformer.resblocks.{layer}"
        for norm in ("ln_1", "ln_2"):
            shapes[f"{block}.{norm}.weight"] = shapes[f"{block}.{norm}.bias"] = (width,)
        shapes[f"{block}.attn.in_proj_weight"], shapes[f"{block}.attn.in_proj_bias"] = (3 * width, width), (3 * width,)
        shapes[f"{block}.attn.out_proj.weight"], shapes[f"{block}.attn.out_proj.bias"] = (width, width), (width,)
        shapes[f"{block}.mlp.c_fc.weight"], shapes[f"{block}.mlp.c_fc.bias"] = (4 * width, width), (4 * width,)
        shapes[f"{block}.mlp.c_proj.weight"], shapes[f"{block}.mlp.c_proj.bias"] = (width, 4 * width), (width,)
    return {name: TensorInfo(shape, FLOAT32) for name, shape in sorted(shapes.items())}


def make_checkpoints(
    folder: Path, name: str, experts: int, device: torch.device | str = "cpu"
) -> tuple[Path, list[Path]]:
    """Write a random base and experts, where missing: weights ~ N(0, .02²), differences ~ N(0, .001²).

    Args:
        name: of the model, as `shapes_of` knows it.
        device: draws the numbers; the processor takes minutes for 1.2 B parameters and three experts.
    """
    infos = shapes_of(name)
    paths = [
        folder / f"{name}-base.safetensors",
        *(folder / f"{name}-{index:02d}.safetensors" for index in range(experts)),
    ]
    for seed, path in enumerate(paths):
        if path.exists():
            continue
        with StreamWriter(path, infos, {}) as writer:
            base, change = (torch.Generator(device).manual_seed(start) for start in (0, 1 + seed))
            for tensor, info in infos.items():
                values = torch.randn(info.numel, generator=base, device=device).mul_(0.02)
                if seed:
                    values += torch.randn(info.numel, generator=change, device=device).mul_(0.001)
                stored = values.to(info.dtype.torch).cpu()
                for start in range(0, info.numel, BLOCK):
                    writer.write(tensor, start, stored[start : start + BLOCK])
            writer.commit()
    return paths[0], paths[1:]
