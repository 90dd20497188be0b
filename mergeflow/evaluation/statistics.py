"""Statistics of an expert on its task's examples: Fisher information and Gram matrices, as files for `data:`."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mergeflow.checkpoints import fingerprint, infos_of, open_checkpoint, write_checkpoint
from mergeflow.checkpoints.align_names import fit_inputs
from mergeflow.checkpoints.formats import expanded
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import open_safetensors
from mergeflow.errors import MergeflowError
from mergeflow.evaluation.adamerging import RECIPE, open_judged
from mergeflow.merging import Recipe, load_recipe, prepare
from mergeflow.merging.execution.device import check_device
from mergeflow.merging.files.output import check_file
from mergeflow.merging.files.plan import check_origin, open_base
from mergeflow.merging.files.recipe import recipe_text
from mergeflow.merging.preflight import Remark, adapter_findings
from mergeflow.modalities.catalog import is_recorded
from mergeflow.modalities.classification import Subset
from mergeflow.modality import Model, Predictions, State
from mergeflow.schema import check_seed
from mergeflow.training.arithmetic import arithmetic

Labels = Literal["sampled", "all"]


def diagonal_fisher(
    model: Model,
    examples: Predictions,
    *,
    labels: Labels = "sampled",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    r"""Return the diagonal of the Fisher information of every parameter.

    F = 1/N Σ_i E_{y ~ p_i} [(∇_θ log p_i(y))²] over the N predictions of all examples

    The labels are the model's own, never the data's (that would be the empirical Fisher). `sampled` draws one y per
    prediction, as the paper does where classes are many; `all` sums over the classes weighted by p, exact and C times
    the work. One gradient per prediction: its square cannot be formed from the gradient of a batch, and one at a time
    keeps memory at three copies of the model for any architecture.

    Args:
        model: Its module's parameters are the θ. Put into evaluation mode, its weights untouched.
        examples: At least one; labels play no part.

    Returns:
        Fisher ≥ 0 by the module's parameter names, float32, summed in float64; zeros where no gradient flows.

    Source: Matena and Raffel, Merging models with Fisher-weighted averaging (NeurIPS 2022), section 3.
    """
    check_seed(seed)
    model.module.eval()
    parameters = {name: value for name, value in model.module.named_parameters() if value.is_floating_point()}
    totals = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
    drawing = torch.Generator().manual_seed(seed) if labels == "sampled" else None
    predictions, wanted = 0, {name: value.requires_grad for name, value in parameters.items()}
    try:
        model.module.requires_grad_(True)
        for row in range(len(examples)):
            with torch.enable_grad():
                log_p = examples.log_p(model, torch.tensor([row]))
            _add_squares(totals, parameters, [term for line in log_p for term in _weighted(line, drawing)])
            predictions += len(log_p)
            if progress is not None:
                progress(row + 1, len(examples))
    finally:
        for name, value in parameters.items():
            value.requires_grad_(wanted[name])
    return {name: (total / predictions).float().cpu() for name, total in totals.items()}


def _add_squares(
    totals: dict[str, Tensor], parameters: dict[str, nn.Parameter], terms: Sequence[tuple[Tensor, float]]
) -> None:
    """Add the weighted squares of the terms' gradients, one at a time, so that no more of them are in memory."""
    for number, (term, weight) in enumerate(terms, start=1):
        more = number < len(terms)
        gradients = torch.autograd.grad(term, list(parameters.values()), retain_graph=more, allow_unused=True)
        for total, gradient in zip(totals.values(), gradients, strict=True):
            if gradient is not None:
                wide = gradient.double()
                total.addcmul_(wide, wide, value=weight)
        del gradients


def _weighted(log_p: Tensor, generator: torch.Generator | None) -> list[tuple[Tensor, float]]:
    """Return log p of a prediction's drawn class with weight 1, or of all classes with their probabilities."""
    shares = log_p.detach().double().exp()
    if generator is not None:
        return [(log_p[int(torch.multinomial(shares.cpu(), 1, generator=generator))], 1.0)]
    return [(log_p[y], share) for y, share in enumerate(shares.tolist())]


# Gram matrices of the inputs of every linear weight, as RegMean needs them.


class _Totals:
    """Sums of XᵀX and of rows, by weight: layers that share one are one."""

    def __init__(self) -> None:
        self.sums: dict[Tensor, Tensor] = {}
        self.rows = Counter[Tensor]()

    def add(self, weight: Tensor, inputs: Tensor) -> None:
        rows = inputs.detach().reshape(-1, inputs.shape[-1]).float()
        product = rows.T @ rows
        if weight not in self.sums:
            self.sums[weight] = torch.zeros_like(product, dtype=torch.float64)
        self.sums[weight] += product
        self.rows[weight] += len(rows)

    def linear(self, module: Any, args: tuple[Any, ...]) -> None:
        # The out_proj inside an attention is a Linear that is never called: its hook stays silent.
        self.add(module.weight, args[0])

    def attention(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ("query", "key", "value")
        query, key, value = (args[at] if at < len(args) else kwargs[part] for at, part in enumerate(names))
        # Attention to other rows (poolers): no single X multiplies the fused weight, so it has no Gram.
        if query is key is value and module.in_proj_weight is not None:
            self.add(module.in_proj_weight, query)
            self.add(module.out_proj.weight, _joined_heads(module, query, kwargs))


@torch.no_grad()
def input_grams(
    model: Model,
    examples: Predictions,
    *,
    batch_size: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    r"""Return the Gram matrix of the inputs of every linear weight.

    G = 1/R Σ_r x_r x_rᵀ over all R rows (tokens of all examples) that enter a weight W [out, in], in whatever layer

    The mean, not the sum: experts with fewer examples or tokens count the same. Linear weights are those of `nn.Linear`
    and of self-attention: the fused in_proj (q, k and v see the same rows, so one Gram serves the 3d × d weight) and
    the out_proj, whose inputs are the joined heads. Convolutions, embeddings, norms and bare projections get none, and
    `regmean` averages them, as its authors do.

    Args:
        model: Its module is put into evaluation mode.
        examples: At least one; labels play no part.

    Returns:
        [in, in] float32 by the weight's name, symmetric; products in float32, summed in float64.

    Source: Jin et al., Dataless knowledge fusion by merging weights (ICLR 2023), section 3.2.
    """
    model.module.eval()
    totals, hooks = _Totals(), []
    for part in model.module.modules():
        if isinstance(part, nn.MultiheadAttention):
            hooks.append(part.register_forward_pre_hook(totals.attention, with_kwargs=True))
        elif isinstance(part, nn.Linear):
            hooks.append(part.register_forward_pre_hook(totals.linear))
    try:
        done = 0
        for rows in torch.arange(len(examples)).split(batch_size):
            examples.log_p(model, rows)
            done += len(rows)
            if progress is not None:
                progress(done, len(examples))
    finally:
        for hook in hooks:
            hook.remove()
    if not totals.sums:
        raise MergeflowError("this model has no linear weight with inputs to measure: RegMean would be the average.")
    return {
        f"{name}.{key}": (totals.sums[weight] / totals.rows[weight]).float().cpu()
        for name, part in model.module.named_modules(remove_duplicate=False)
        if isinstance(part, nn.Linear | nn.MultiheadAttention)
        for key, weight in part.named_parameters(recurse=False)
        if weight in totals.sums
    }


def _joined_heads(module: Any, query: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Return the input of out_proj: the attention with the identity in its place."""
    rows = query.transpose(0, 1) if module.batch_first and query.ndim == 3 else query
    identity = torch.eye(module.embed_dim, dtype=query.dtype, device=query.device)
    heads, _ = F.multi_head_attention_forward(
        rows,
        rows,
        rows,
        module.embed_dim,
        module.num_heads,
        module.in_proj_weight,
        module.in_proj_bias,
        module.bias_k,
        module.bias_v,
        module.add_zero_attn,
        0.0,
        identity,
        None,
        training=False,
        need_weights=False,
        attn_mask=kwargs.get("attn_mask"),
        key_padding_mask=kwargs.get("key_padding_mask"),
        is_causal=kwargs.get("is_causal", False),
    )
    return heads


# Where estimates from data go: they replace no input, and nothing that mergeflow did not make.

_KINDS = ("fisher", "gram", "coefficients")


def check_estimate(out: Path, inputs: Mapping[str, str], force: bool = False) -> None:
    """Check that a file of estimates may be written: as `check_file`, and an earlier estimate may be replaced.

    Args:
        inputs: Paths of what is read, by name: never overwritten.
        force: Whether a file that mergeflow did not make may be replaced.
    """
    check_file(out, {name: str(expanded(path)) for name, path in inputs.items()}, force or _is_estimate(out))


def check_learned_place(place: Path, recipe: Recipe, inputs: Mapping[str, str], force: bool = False) -> None:
    """Check that a folder may take AdaMerging's coefficients and the recipe that uses them.

    Args:
        recipe: What the coefficients are learned for; what it and its steps read are inputs.
        inputs: Paths of what else is read, by name; the recipe's own among them.
        force: Whether files that mergeflow did not make may be replaced.
    """
    steps = [path for _, step in recipe.steps or () for path in step.paths()]
    read = {**inputs, **{path: path for path in (*recipe.paths(), *steps)}}
    for name, _ in (*recipe.experts, *recipe.task_vectors):
        check_estimate(place / f"{name.replace('/', '_')}.safetensors", read, force)
    written = place / RECIPE
    for name, path in inputs.items():
        if written.exists() and Path(path).exists() and written.samefile(path):
            raise MergeflowError(f"out '{place}' would overwrite the input '{name}' ({path}): choose another folder.")
    if written.exists() and not force and not _is_learned(written):
        raise MergeflowError(
            f"out '{place}' holds a {RECIPE} that `adamerge` did not write: choose another folder, move that file, or "
            "give --force to replace it."
        )


def _is_estimate(file: Path) -> bool:
    try:
        with open_safetensors(file) as state:
            return state.metadata.get("kind") in _KINDS and {"expert", "split"} <= state.metadata.keys()
    except MergeflowError:
        return False


def _is_learned(file: Path) -> bool:
    """Whether a recipe is as `adamerge` wrote it: it names coefficients, and nobody has edited it since."""
    try:
        recipe = load_recipe(file)
        return "coefficients" in dict(recipe.data) and recipe_text(recipe) == file.read_text(encoding="utf-8")
    except MergeflowError:
        return False


# Statistics of an expert on its task's examples, as files that a recipe's `data:` takes.

Kind = Literal["fisher", "gram"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class StatisticOrder:
    """What is measured.

    Attributes:
        expert: The expert's checkpoint.
        task: Its prepared folder.
        head: Its head's file; a Gram needs none, and neither does a task without a head.
        architecture: Of an image encoder; or the file of a base that says itself what it is, as of texts.
        samples: Examples, drawn without replacement; all where there are fewer.
        split: Whose examples; their labels are not used. Test is refused.
        labels: For `fisher`: one label per example, drawn from the model, or all classes.
        seed: Of the drawn examples and labels.
        batch_size: For `gram`: examples per forward pass.
    """

    kind: Kind
    expert: str
    task: str
    architecture: str
    head: str | None = None
    samples: int = 256
    split: str = "train"
    labels: Labels = "sampled"
    seed: int = 0
    batch_size: int = 32
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_seed(self.seed)


@arithmetic()
def write_statistic(
    order: StatisticOrder,
    out: str | Path,
    progress: Progress | None = None,
    *,
    force: bool = False,
    remark: Remark = lambda _notes, _warnings: None,
) -> tuple[str, int]:
    """Measure a statistic and write it as safetensors; return its fingerprint and the number of examples used.

    Args:
        progress: called with the examples done and in all.
        force: whether a file that mergeflow did not make may be replaced; an input never is.
    """
    check_order(order, Path(out), force)
    model, examples = open_drawn(order)
    source, infos = _load_expert(model, order, remark)
    if order.kind == "gram":
        statistic = input_grams(model, examples, batch_size=forward_rows(order), progress=progress)
    else:
        statistic = diagonal_fisher(model, examples, labels=order.labels, seed=order.seed, progress=progress)
        # Floating-point buffers have no gradient: zero, so that they are averaged.
        buffers = {name: info for name, info in infos.items() if info.dtype.is_floating_point and name not in statistic}
        statistic |= {name: torch.zeros(info.shape) for name, info in buffers.items()}
    _check_statistic(order, statistic)
    record = {
        "kind": order.kind,
        "expert": source,
        "samples": str(len(examples)),
        "split": order.split,
        "seed": str(order.seed),
        **({"labels": order.labels} if order.kind == "fisher" else {}),
    }
    return write_checkpoint(out, statistic, record), len(examples)


def _load_expert(model: Model, order: StatisticOrder, remark: Remark) -> tuple[str, dict[str, TensorInfo]]:
    """Load the expert as a merge takes it: by the names of the base that the architecture names, and added to it."""
    with ExitStack() as files:
        expert = files.enter_context(open_checkpoint(order.expert))
        state: State = expert
        notes, warnings = tuple[str, ...](), [*expert.notes]
        if is_recorded(order.architecture):
            base = files.enter_context(open_base(order.architecture))
            fit = fit_inputs(base, {"expert": expert})
            fit.check()
            check_origin(fit.base, fit.experts)
            state, notes = fit.experts["expert"], fit.notes
            warnings += [finding.text for finding in adapter_findings(fit.base, fit.experts)]
            if expert.is_task_vector:
                state = prepare("task_arithmetic", fit.base, fit.experts).at(1.0)
        elif expert.is_task_vector:
            raise MergeflowError(
                f"the expert '{order.expert}' is a task vector or an adapter, and --architecture names no base to add "
                "it to: make the whole model first, by a merge of `task_arithmetic` with scale 1."
            )
        remark(notes, warnings)
        model.load(state)
        return fingerprint(state), infos_of(state)


def forward_rows(order: StatisticOrder) -> int:
    """Return the examples of one forward pass of a Gram: beside longer texts padding would count as tokens."""
    return 1 if is_recorded(order.architecture) else order.batch_size


def open_drawn(order: StatisticOrder) -> tuple[Model, Subset]:
    """Return the model with any weights, and the examples in an order drawn from the seed."""
    model, opened = open_judged(order.architecture, order.device, headed=order.kind == "fisher")
    task = Path(order.task).name
    examples = opened(task, order.task, order.split, order.head)
    drawn = torch.randperm(len(examples), generator=torch.Generator().manual_seed(order.seed))
    return model, Subset(examples, drawn[: order.samples])


def check_order(order: StatisticOrder, out: Path, force: bool = False) -> None:
    """Refuse what cannot be measured, before anything is read."""
    check_device(order.device)
    if order.split == "test":
        raise MergeflowError("statistics that shape a merge are never taken from test: use train or validation.")
    if order.samples < 1 or order.batch_size < 1:
        raise MergeflowError(f"samples and batch_size are at least 1, found {order.samples} and {order.batch_size}.")
    if order.kind == "fisher" and order.head is None and not is_recorded(order.architecture):
        raise MergeflowError("the Fisher information needs the task's head: give --head.")
    inputs = {"expert": order.expert, "task": order.task}
    inputs |= {"head": order.head} if order.head is not None else {}
    inputs |= {"architecture": order.architecture} if is_recorded(order.architecture) else {}
    check_estimate(out, inputs, force)


def _check_statistic(order: StatisticOrder, statistic: dict[str, Tensor]) -> None:
    for name, value in statistic.items():
        if not bool(value.isfinite().all()):
            raise MergeflowError(f"the {order.kind} of '{order.expert}' is not finite in '{name}': check the expert.")
    if not any(bool(value.any()) for value in statistic.values()):
        raise MergeflowError(
            f"the {order.kind} of '{order.expert}' is 0 everywhere, so that a merge would pass over the expert: its "
            "answers are certain, as with one class, or its inputs are 0. Give a task of several classes."
        )
