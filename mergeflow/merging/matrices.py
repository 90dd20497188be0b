"""The tensors that spectral methods treat as matrices, and into how many each is cut."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mergeflow.checkpoints.header import TensorInfo
from mergeflow.errors import MergeflowError, together
from mergeflow.merging.architectures.architecture import (
    LOOKS_FUSED,
    ROLES,
    TREATED,
    UNKNOWN,
    Architecture,
    Selected,
    family_of,
)


def _selection(value: Any) -> Any:
    patterns = isinstance(value, list | tuple) and value and all(isinstance(pattern, str) for pattern in value)
    if not patterns and not (isinstance(value, str) and value in TREATED):
        raise ValueError(f"expected {', '.join(TREATED)}, or a list of patterns of names, found {value!r:.60}")
    return value


Selection = Annotated[Selected, BeforeValidator(_selection)]
"""`attn_mlp`: attention, MLP and experts; `mlp`: the last two; `all`: projections too; or patterns of names.

See docs/architectures.md.
"""

Matrices = Annotated[
    Selection,
    Field(description=f"which matrices are treated: {', '.join(TREATED)}, or glob patterns; see architectures.md"),
]
SplitQkv = Annotated[
    bool, Field(description="treat each fused weight (q/k/v, gate/up) as the matrices it holds; see architectures.md")
]


def is_matrix(name: str, shape: Sequence[int], selection: Selection) -> bool:
    """Whether a selection takes a tensor as a matrix, by its name alone."""
    return Architecture(family_of(None, [name])).treats(name, shape, selection)


def rank_of(shape: Sequence[int], ratio: float, rounding: Literal["ceil", "floor"]) -> int:
    """Return k for a matrix: ceil(ratio · min side), or max(1, floor(·))."""
    exact = ratio * min(shape)
    # A product such as 0.07 · 100 = 7.000000000000001 must not round up to 8.
    near = round(exact)
    if abs(exact - near) < 1e-9:
        return max(1, near)
    return ceil(exact) if rounding == "ceil" else max(1, int(exact))


_WAY_OUT = "Name those to treat by patterns, such as matrices: ['*.attention.*', '*.dense.*']."


@dataclass(frozen=True)
class Treatment:
    """How a model's tensors are treated: its family, and what told it; names of matrices treated and left, by role."""

    family: str
    treated: Mapping[str, tuple[str, ...]]
    left: Mapping[str, tuple[str, ...]]
    cuts: Mapping[str, str]

    @property
    def count(self) -> int:
        return sum(map(len, self.treated.values()))

    def lines(self) -> list[str]:
        """List the matrices that are treated, left out and cut, a line each with counts and patterns of names."""
        lines = [f"architecture  {self.family}"]
        lines += [f"treated       {role}: {_patterns(names)}" for role, names in self.treated.items()]
        lines += [f"not treated   {role}: {_patterns(names)}" for role, names in self.left.items()]
        ways = sorted(set(self.cuts.values()))
        lines += [
            f"cut           {_patterns(n for n, way in self.cuts.items() if way == kind)}: {kind}" for kind in ways
        ]
        return lines


def survey(
    owner: str,
    selection: Selection | None,
    split_fused: bool,
    infos: Mapping[str, TensorInfo],
    tied: Mapping[str, str],
    architecture: Architecture,
) -> Treatment:
    """Return how a model's tensors will be treated.

    Args:
        owner: Who treats them, for the message: "method 'cart'".
        selection: What its arguments say; None where no matrices are treated apart.
        tied: Names that share storage, each with the first name of its group, by which both go.
    """
    model_type = architecture.config.get("model_type")
    family = architecture.family
    kind = "of no family of the table, roles by names" if family is UNKNOWN else family.name
    summary = kind + (f" (model_type {model_type})" if model_type else " (by names)" * (family is not UNKNOWN))
    if selection is None:
        return Treatment(summary, {}, {}, {})
    shapes = {
        tied.get(name, name): info.shape
        for name, info in infos.items()
        if info.dtype.is_floating_point and architecture.is_wide(tied.get(name, name), info.shape)
    }
    taken = {name for name, shape in shapes.items() if architecture.treats(name, shape, selection)}
    together(
        lambda: _check_known(owner, selection, infos, shapes, architecture),
        lambda: _check_taken(
            owner, selection, shapes, taken, architecture, any(len(i.shape) > 3 for i in infos.values())
        ),
        lambda: _check_fused(owner, split_fused, taken, architecture),
    )
    roles = {name: architecture.role(name, shape) or "unknown" for name, shape in shapes.items()}
    forms = {name: architecture.form(name, shapes[name], split_fused) for name in sorted(taken)}
    cuts = {name: f"{form.cut or 'one matrix'}{' of each expert' * form.stacked}" for name, form in forms.items()}
    return Treatment(
        summary,
        _by_role(roles, taken),
        _by_role(roles, shapes.keys() - taken),
        {name: words for name, words in cuts.items() if words != "one matrix"},
    )


def _by_role(roles: Mapping[str, str], names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    chosen = set(names)
    by_role = {role: tuple(sorted(name for name in chosen if roles[name] == role)) for role in (*ROLES, "unknown")}
    return {role: held for role, held in by_role.items() if held}


def _check_known(
    owner: str,
    selection: Selection,
    infos: Mapping[str, TensorInfo],
    shapes: Mapping[str, tuple[int, ...]],
    architecture: Architecture,
) -> None:
    if isinstance(selection, tuple):
        return
    deep = [
        name
        for name, info in infos.items()
        if len(info.shape) == 3
        and min(info.shape) > 1
        and "conv" not in name.lower()
        and architecture.role(name, info.shape) in ("attention", "mlp")
    ]
    if deep:
        raise MergeflowError(
            f"{owner}: {len(deep)} weights of attention or MLPs have three dimensions, as XLNet's [d, heads, d_head] "
            f"({_patterns(deep)}), and only two make a matrix. {_WAY_OUT}"
        )
    unknown = [name for name, shape in shapes.items() if architecture.role(name, shape) is None]
    if unknown:
        raise MergeflowError(
            f"{owner}: no rule says what {len(unknown)} of {len(shapes)} matrices are ({_patterns(unknown)}), so "
            f"`matrices: {selection}` cannot take or leave them. {_WAY_OUT}"
        )


def _check_taken(
    owner: str,
    selection: Selection,
    shapes: Mapping[str, tuple[int, ...]],
    taken: set[str],
    architecture: Architecture,
    convolutions: bool,
) -> None:
    listed = f"There are {len(shapes)}: {_patterns(shapes)}." if shapes else "There is no matrix at all."
    if isinstance(selection, tuple):
        for pattern in selection:
            if not any(fnmatchcase(name, pattern) for name in shapes):
                raise MergeflowError(f"{owner}: the pattern '{pattern}' of `matrices` fits no matrix. {listed}")
    elif all(architecture.role(name, shape) is None for name, shape in shapes.items()) and shapes:
        return  # that no rule knows any is said already
    elif not taken and (shapes or convolutions):
        some = any(architecture.treats(name, shape, "all") for name, shape in shapes.items())
        wider = f"`matrices: all` takes {'attention and ' * (selection == 'mlp')}projections too. " if some else ""
        other = "" if some else " Weights of convolutions are not matrices here: ties or dare treat all tensors alike."
        raise MergeflowError(
            f"{owner}: `matrices: {selection}` takes none of the matrices. {listed} {wider}{_WAY_OUT}{other}"
        )


def _check_fused(owner: str, split_fused: bool, taken: set[str], architecture: Architecture) -> None:
    if not split_fused:
        return
    rules = {name: architecture.fused(name) for name in taken}
    strange = [name for name, rule in rules.items() if rule is None and LOOKS_FUSED.search(name)]
    if strange:
        raise MergeflowError(
            f"{owner}: `split_qkv: true`, but no rule says how {_patterns(strange)} is fused in a model of "
            f"{architecture.family.name}. Open the model's folder, so that its config.json is read, or leave "
            "`split_qkv: false`."
        )
    if all(rule is None or rule.always for rule in rules.values()):
        raise MergeflowError(
            f"{owner}: `split_qkv: true`, but none of the {len(taken)} treated matrices is a fused weight: remove it."
        )


def _patterns(names: Iterable[str]) -> str:
    """Return names with their numbers as stars, most frequent first, with counts: '4 × layers.*.q.weight, 1 × head'."""
    counts = Counter(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in sorted(names)).most_common()
    shown = ", ".join(f"{count} × {pattern}" for pattern, count in counts[:6])
    return shown + f" and {sum(count for _, count in counts[6:])} more" * (len(counts) > 6)
