"""Take the image tower out of a whole CLIP: python image_tower.py WHOLE BASE OUT."""

import sys

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

whole, base, out = sys.argv[1:]
if whole.endswith(".safetensors"):
    tensors = load_file(whole)
else:
    tensors = torch.load(whole, map_location="cpu", weights_only=True)  # tensors alone: a pickled module is refused
    tensors = tensors.get("state_dict", tensors)
named = {name[name.find("visual.") :]: tensor for name, tensor in tensors.items() if "visual." in name}
with safe_open(base, "pt") as file:
    wanted = list(file.keys())
if missing := [name for name in wanted if name not in named]:
    sys.exit(f"{whole} lacks {len(missing)} tensors of {base}, among them {missing[0]}")
save_file({name: named[name].float().contiguous() for name in wanted}, out)
