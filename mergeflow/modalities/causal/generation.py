"""How a causal model goes on from texts: greedily, or drawn with a seed."""

from collections.abc import Sequence

import torch

from mergeflow.modalities.causal.model import LanguageModule
from mergeflow.modalities.causal.sections import Generation
from mergeflow.modalities.random_numbers import own_generator


@torch.no_grad()
def continued(module: LanguageModule, prompts: Sequence[Sequence[int]], how: Generation, end: int) -> list[list[int]]:
    """Return the tokens that a model puts behind each prompt, without the prompt and the end token.

    Prompts are answered one at a time, each with the seed anew: an answer does not depend on its neighbours. On one
    machine the same model and prompt give the same answer.

    Args:
        module: the model.
        prompts: tokens, at least one each; of a prompt that leaves no room among the model's positions the first are
            left out.
        how: how many tokens, and how they are chosen.
        end: the id of the token that ends a text.
    """
    whole = module.eval().whole
    device = next(module.parameters()).device
    known = getattr(whole.config, "max_position_embeddings", None) or 2**31
    drawn = {"do_sample": True, "temperature": how.temperature, "top_k": 0} if how.temperature else {"do_sample": False}
    found = []
    for prompt in prompts:
        tokens = min(how.tokens, known - 1)
        ids = torch.tensor([list(prompt)[-(known - tokens) :]], device=device)
        with own_generator(how.seed, device, alone=bool(how.temperature) and device.type == "cpu"):
            whole_ids = whole.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                pad_token_id=end,
                eos_token_id=end,
                **drawn,
            )
        new = whole_ids[0, ids.shape[1] :].tolist()
        found.append(new[: new.index(end)] if end in new else new)
    return found


@torch.no_grad()
def greedy(module: LanguageModule, given: Sequence[Sequence[int]], tokens: int, end: int) -> list[list[int]]:
    """Return the likeliest tokens behind prompts of one length, as many for each whatever comes.

    Args:
        module: the model.
        given: the prompts' tokens, [n][L].
        tokens: how many are written: an end token would stop a row, and what is behind it would be padding.
        end: the id of the token that ends a text.
    """
    prompts = torch.tensor([list(ids) for ids in given], device=next(module.parameters()).device)
    ids = module.eval().whole.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=end,
    )
    found: list[list[int]] = ids[:, prompts.shape[1] :].tolist()
    return found
