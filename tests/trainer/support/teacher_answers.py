"""Teacher columns made without a teacher."""

from typing import Any

import numpy as np

from rolloutmq.schemas.group import Group
from rolloutmq.schemas.loss_mask import trained_tokens
from rolloutmq.schemas.wire.distillation import IDS_COLUMN, LOGPROBS_COLUMN


def said(group: Group, k: int, vocabulary: int, *, prompts: bool = False, seed: int = 0) -> dict[str, Any]:
    """For each trained token its own id and others, and their log-probabilities; `k` of `vocabulary` tokens.

    With `prompts` also for tokens that are not trained.
    """
    rng = np.random.default_rng(seed)
    trained = trained_tokens(group)
    ids: list[list[int]] = []
    logprobs: list[list[float]] = []
    for token, wanted in zip(group.columns["tokens"].values, trained, strict=True):
        if not (wanted or prompts):
            ids.append([])
            logprobs.append([])
            continue
        others = [one for one in rng.permutation(vocabulary).tolist() if one != token]
        drawn = rng.normal(size=vocabulary)
        spread = drawn - np.log(np.exp(drawn).sum())
        ids.append([*others[: k - 1], int(token)])
        logprobs.append(spread[:k].tolist())
    ends = np.cumsum(group.columns["tokens"].lengths[0]).tolist()
    starts = [0, *ends][:-1]
    cut = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
    return {IDS_COLUMN: [ids[c] for c in cut], LOGPROBS_COLUMN: [logprobs[c] for c in cut]}
