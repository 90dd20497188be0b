"""Tasks that nobody trained: which sums of orthogonal tasks' vectors solve them, beside what Equation 7 promises."""

from collections.abc import Iterator

import numpy as np
import torch

from mergeflow.errors import MergeflowError
from studies.old.papers.laboratory.options import Options, column, start, task_of, test_set, trained
from studies.old.rows import Row
from studies.theory.coefficients import closed_form, out_of_domain
from studies.theory.laboratory import combined, judge


def target_rows(options: Options, seed: int) -> Iterator[Row]:
    """Yield, for every target and every λ, the loss on the target and whether Equation 7 promises success.

    λ are drawn, and both closed forms are tried: `printed` and `derived`. β is measured: what the loss of task 1 rises
    per unit of λ when an orthogonal task is added or taken away, at most over λ in [−3, 3].
    """
    begin, output = start(options, seed)
    most = max(len(gammas) for gammas in options.targets)
    axes = torch.eye(options.dimensions, dtype=torch.float64)
    patterns, beyond, rest = axes[:most], axes[most], axes[most + 1 :]
    tasks = [task_of(options, pattern, rest) for pattern in patterns]
    vectors = [trained(options, begin, output, task, 10 * seed + number) for number, task in enumerate(tasks)]
    inputs, labels = test_set(options, tasks[0], seed)
    tried = column([-3, -2, -1, 1, 2, 3])
    cost = judge(combined(begin, vectors[:2], torch.stack([torch.ones_like(tried), tried], 1)), output, inputs, labels)
    beta = float((cost.hinge / tried.abs()).max())
    draw = np.random.default_rng(seed)
    for number, gammas in enumerate(options.targets):
        towards = column(gammas)
        kappa = float((1 - towards.square().sum()).clamp_min(0).sqrt())
        target = task_of(options, towards @ patterns[: len(gammas)] + kappa * beyond, rest)
        chance = draw.uniform(-1, 3, (options.drawn, len(gammas)))
        kinds = [*(("drawn", scales) for scales in chance), *_closed(gammas, options.c)]
        by = np.stack([scales for _, scales in kinds])
        models = combined(begin, vectors[: len(gammas)], torch.from_numpy(by))
        judged = judge(models, output, *test_set(options, target, 100 + seed))
        promised = out_of_domain(by, gammas, beta, options.c)
        for index, (kind, scales) in enumerate(kinds):
            yield {
                "part": "target",
                "seed": seed,
                "target": number,
                "gammas": " ".join(f"{gamma:g}" for gamma in gammas),
                "scales": " ".join(f"{scale:.4f}" for scale in scales),
                "kind": kind,
                "beta": beta,
                "first_sum": float(scales @ np.array(gammas)),
                "second_sum": float(scales @ np.array(gammas) ** 2),
                "promised": bool(promised[index]),
                "hinge_1": float(judged.hinge[index]),
                "accuracy_1": float(judged.accuracy[index]),
            }


def _closed(gammas: list[float], c: float) -> list[tuple[str, np.ndarray]]:
    try:
        return [("printed", closed_form(gammas, c, printed=True)), ("derived", closed_form(gammas, c))]
    except MergeflowError:
        return []
