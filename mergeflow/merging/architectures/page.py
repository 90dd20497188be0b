"""The page of architectures, written from the tables: `mergeflow docs architectures`."""

from mergeflow.merging.architectures.architecture import BARE, FAMILIES, ROLES, TREATED, VOCABULARY, Family
from mergeflow.merging.architectures.blocks import ENCODERS, PAIRS, STACKED, TOWERS

_HEAD = """# Architectures

Spectral methods look up here what each tensor is. The family comes from `model_type` in config.json, which is read
with the weights of a model folder (for weights in memory, pass it: `prepare(…, config=model.config.to_dict())`);
without one from names that only one family has; else from names alone. `mergeflow check` prints, for a recipe and its
files, what is treated by role, what is not, and how each fused weight is cut. The tables are tested against
transformers' own classes: every parameter has a role that fits its module, every matrix inside the blocks is taken, and
cuts are tried on the models' outputs.

## What `matrices` takes

{taken}
- a list of patterns such as `["*.self_attn.*", "*.mlp.*"]` takes what fits, whatever its role.

A matrix is a 2-D weight with both sides > 1; a 3-D tensor of experts `[E, m, n]` is E matrices. The three words
**never** take embeddings, positions and token types (tables whose rows are looked up), heads and routers (rows that are
compared with each other), norms, biases and convolutions. Each method's page says what happens to these: most methods
average them. Where no rule knows the name of a matrix, the three words are refused: give patterns.
A `model_type` that is of no family below is known by its names alone; slices and `split_qkv` need a family.

CLIP differs, so that results are those of the published code, which treats every 2-D weight but the two tables named
`text_projection` and `token_embedding`: there `all` takes the position tables too.

## Roles by name

The first pattern (a regular expression on the lower-case name) that fits decides; a family's own come first.

| role | patterns |
|---|---|
{roles}

## Whose layers can be taken

Slices of layers (`slices:` of a recipe) may be taken from models of the families {stacked},
and from encoders with the `model_type` {encoders}: one row of blocks that are alike.
Of models with two rows a slice names one by its module, `stack: decoder`: encoders and decoders of {pairs},
and models whose sections of config.json (`text_config`, `vision_config`) are of a family above, or {towers},
as in CLIP, SigLIP and LLaVA. The table of distances of T5's first block stays with its stack.
Where config.json says that a block depends on its index (leading dense blocks, periods of attention), they are refused.
Lists with an entry per block, such as `layer_types`, follow their blocks.

Refused are models of stages (Swin) and of one block that all layers share (ALBERT); blocks that differ by index
(ModernBERT's first has no norm, DeBERTa has a convolution behind the first); and backbones whose config.json names
their layers (DINOv2, BEiT).

## Families and their fused weights

`split_qkv: true` cuts fused weights (query/key/value, gate/up) into the matrices they hold before a method sees them;
sizes come from config.json. Where a layout is not known, or nothing is fused, it is refused. Weights stored as
[in, out] are turned for methods whose formula tells inputs from outputs (`wudi`, `knots`).

| family | `model_type` | fused weights | stored [in, out] |
|---|---|---|---|
{families}

Every family: {bare}.
"""


def _code(pattern: str) -> str:
    return f"`{pattern}`".replace("|", "\\|")


def _row(family: Family) -> str:
    cuts = [f"{_code(pattern)}: {rule.words}{' (always cut)' * rule.always}" for pattern, rule in family.fused]
    turned = _code(family.transposed) if family.transposed else "–"
    return f"| {family.name} | {', '.join(family.types)} | {'; '.join(cuts) or '–'} | {turned} |"


def architectures_page() -> str:
    """Return the page as Markdown."""
    shared = {role: [_code(pattern) for pattern, other in VOCABULARY if other == role] for role in ROLES}
    by_role = {
        role: [f"{_code(p)} ({f.name})" for f in FAMILIES for p, other in f.roles if other == role] for role in ROLES
    }
    return _HEAD.format(
        stacked=", ".join(STACKED),
        encoders=", ".join(ENCODERS),
        pairs=", ".join(PAIRS),
        towers=", ".join(TOWERS),
        taken="\n".join(f"- `{name}`: {', '.join(roles)};" for name, roles in TREATED.items()),
        roles="\n".join(f"| {role} | {' '.join((*by_role[role], *shared[role]))} |" for role in ROLES),
        families="\n".join(map(_row, FAMILIES)),
        bare="; ".join(
            f"{_code(pattern)}{' (without config.json)' * bool(index)}: {rule.words}"
            for index, (pattern, rule) in enumerate(BARE)
        ),
    )
