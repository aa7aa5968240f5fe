"""How likely the policy finds the trained tokens, without a table of all of them by the whole vocabulary.

    tokens -> blocks of the policy -> hidden states of the trained tokens -> chunk by chunk: head, softmax

With 4,096 tokens and 32,000 words one such table is half a gigabyte, and the plain way has several: logits, log-
probabilities, and the gradient of both. Here only the logits of one chunk exist at a time, forwards and backwards; the
backward pass computes them again, which costs one product of matrices more and saves as much in passes over memory.

A head that is more than a linear layer (Gemma cuts its logits off, Cohere scales them) would mean something else if it
were taken apart: two tokens are tried when the scorer is made. Such a policy is asked whole, but its head is shown the
hidden states of the trained tokens alone.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

logger = logging.getLogger(__name__)

_PROBE: Final = ((0, 1),)
_PROBE_TOLERANCE: Final = 1e-3


class Scorer(nn.Module):
    """Asks a causal language model about tokens. A module, so that what wraps modules (FSDP) can wrap it whole."""

    def __init__(self, policy: nn.Module, logits_bytes: int, *, recompute_blocks: bool = False) -> None:
        super().__init__()
        self.policy = policy
        self._logits_bytes = logits_bytes
        self._takes_head_apart = _has_plain_head(policy)
        self.packs = _can_share_rows(policy)
        """Whether the policy keeps sequences apart that share a row."""
        if recompute_blocks:
            recompute(policy)

    def forward(
        self,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        position_ids: Tensor | None = None,
        also: Tensor | None = None,
        temperatures: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Tell how likely some tokens were, and how undecided the policy was about them.

        Right padding needs no attention mask: a causal model looks back only, and padding lies ahead.

        Args:
            tokens: `(B, T)` token ids, padded on the right.
            rows: `(N,)` row of each token asked for.
            positions: `(N,)` its place in the row, at least 1.
            position_ids: `(B, T)` place of each token in its own sequence, if rows hold several; it begins anew with
                each. No sequence sees another.
            also: `(N, K)` other tokens that could stand in the place of each.
            temperatures: `(N,)` float32, what the logits before each are divided by; None: by 1.

        Returns:
            `(N,)` log-probabilities and `(N,)` entropies in nats, float32 or wider, with gradient. With `also` the
            former are `(N, 1 + K)`: the token that stands there comes first.
        """
        inputs = {"input_ids": tokens[:, :-1], "use_cache": False}
        if position_ids is not None:
            inputs["position_ids"] = position_ids[:, :-1]
        asked, before = tokens[rows, positions], positions - 1  # (N,)
        if also is not None:
            asked = torch.cat([asked[:, None], also], -1)  # (N, 1 + K)
        head = self.policy.get_output_embeddings()  # type: ignore[operator]
        if not self._takes_head_apart:
            with _shown_only(head, rows, before):
                (logits,) = self.policy(**inputs).logits  # (N, V)
            return score_logits(logits, asked, temperatures)
        hidden = self.policy.base_model(**inputs).last_hidden_state  # type: ignore[operator]  # (B, T - 1, H)
        return score_hidden(hidden[rows, before], head, asked, self._logits_bytes, temperatures)

    def idle(self) -> None:
        """Take part in a pass without a token to learn from: its gradients are zero."""
        tokens, rows, positions = torch.zeros(1, 2, dtype=torch.long), torch.tensor([0]), torch.tensor([1])
        logprobs, entropy = self(tokens, rows, positions)
        (0.0 * (logprobs.sum() + entropy.sum())).backward()


@contextmanager
def _shown_only(head: nn.Module, rows: Tensor, places: Tensor) -> Iterator[None]:
    """Let a head see some hidden states alone, as one row `(1, N, H)`: what a policy does behind it is by token.

    transformers has `logits_to_keep` for it, which takes the same places in all rows.
    """

    def chosen(_head: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
        (hidden,) = given
        return hidden[None, rows, places]

    hook = head.register_forward_pre_hook(chosen)
    try:
        yield
    finally:
        hook.remove()


def score_tokens(policy: nn.Module, tokens: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Ask a policy the plain way: all logits at once. See `Scorer.forward`; for small questions."""
    logits = policy(input_ids=tokens[:, :-1], use_cache=False).logits  # (B, T - 1, V)
    return score_logits(logits[rows, positions - 1], tokens[rows, positions])


def score_logits(logits: Tensor, asked: Tensor, temperatures: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Score tokens `(N,)` or `(N, A)` by the logits `(N, V)` before them."""
    logits = _wide(logits)
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    logprobs = logits.log_softmax(-1)  # (N, V)
    # No view: FSDP could not guard one.
    chosen = logprobs.gather(-1, _table(asked)).view(asked.shape).clone()
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


def _table(asked: Tensor) -> Tensor:
    return asked.view(len(asked), -1)  # (N, A)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _has_plain_head(policy: nn.Module) -> bool:
    """Tell whether the logits of a policy are what its head makes of the hidden states, and nothing more."""
    head = policy.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear:
        kind = type(head).__name__
        logger.info("the head is not linear, logits of all trained tokens are kept at once kind=%s", kind)
        return False
    with torch.no_grad():
        probe = {"input_ids": torch.tensor(_PROBE, device=head.weight.device), "use_cache": False}
        whole = policy(**probe).logits.float()
        parts = head(policy.base_model(**probe).last_hidden_state).float()  # type: ignore[operator]
    # Bit for bit: what bends logits bends small ones by little.
    if not torch.equal(whole, parts):
        logger.info(
            "the policy changes its logits behind the head, those of all trained tokens are kept at once"
        )
        return False
    return True


def _can_share_rows(policy: nn.Module) -> bool:
    """Tell whether positions that begin anew are enough for a policy to keep sequences apart."""
    device = next(policy.parameters()).device
    tokens = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 0, 1]], device=device)
    others = tokens.clone()
    others[:, :2] = 1 - others[:, :2]
    places = torch.tensor([[0, 1, 0, 1, 2]], device=device).expand_as(tokens)
    with torch.no_grad():
        shared, beside = (
            policy(input_ids=ids, position_ids=places, use_cache=False).logits[:, 2:].float()
            for ids in (tokens, others)
        )
        alone = policy(input_ids=tokens[:, 2:], use_cache=False).logits.float()
    # What is beside them changes nothing, to the last bit; and they are what they are alone.
    kept_apart = torch.equal(shared, beside)
    if not (kept_apart and torch.allclose(shared, alone, rtol=_PROBE_TOLERANCE, atol=_PROBE_TOLERANCE)):
        logger.info("the policy mixes sequences that share a row, each has one of its own")
        return False
    return True


def score_hidden(
    hidden: Tensor, head: nn.Linear, asked: Tensor, logits_bytes: int, temperatures: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Score tokens `(N,)` or `(N, A)` by the hidden states `(N, H)` before them.

    At most `logits_bytes` of logits exist at once.
    """
    each = head.out_features * max(hidden.element_size(), torch.float32.itemsize)
    chunk = max(1, logits_bytes // each)
    return _ChunkedScores.apply(hidden, head.weight, head.bias, asked, temperatures, chunk)  # type: ignore[no-any-return,no-untyped-call]


class _ChunkedScores(torch.autograd.Function):
    """Log-probabilities and entropies in `N` places, of one token or several in each.

    With logits z, L = log sum exp z, log-probabilities l = z - L, p = exp l and the entropy E = -sum p l:

        d l[a] / d z = 1[a] - p                d E / d z = -p (l + E)

    At a temperature T, z are the logits of the head over T, and their gradient is divided by T once more.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        asked: Tensor,
        temperatures: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        kind = torch.promote_types(hidden.dtype, torch.float32)
        table = _table(asked)  # (N, A)
        sums, entropy = (hidden.new_empty(len(asked), dtype=kind) for _ in range(2))
        chosen = hidden.new_empty(asked.shape, dtype=kind)
        by_place = _table(chosen)  # (N, A)
        for part in _cuts(len(asked), chunk):
            logits = _logits(hidden, weight, bias, temperatures, part)
            highest = logits.amax(-1, keepdim=True)
            by_place[part] = logits.gather(-1, table[part])
            weights = logits.sub_(highest).exp()
            total = weights.sum(-1)
            sums[part] = total.log() + highest.squeeze(-1)
            inner = torch.bmm(weights[:, None], logits[:, :, None]).flatten()
            entropy[part] = total.log() - inner / total
        by_place -= sums[:, None]
        ctx.save_for_backward(hidden, weight, bias, asked, temperatures, sums, entropy)
        ctx.chunk = chunk
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_chosen: Tensor, to_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, asked, temperatures, sums, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        # Sums over chunks are kept wide: rounded to bfloat16 after each, small parts would be lost.
        by_weight = torch.zeros_like(weight, dtype=sums.dtype) if wants_weight else None
        by_bias = torch.zeros_like(bias, dtype=sums.dtype) if wants_bias else None
        by_hidden = torch.empty_like(hidden) if wants_hidden else None
        undecided = bool(to_entropy.any())
        table, to_table = _table(asked), to_chosen.reshape(len(asked), -1)  # (N, A)
        for part in _cuts(len(asked), ctx.chunk):
            logprobs = _logits(hidden, weight, bias, temperatures, part).sub_(sums[part, None])  # (C, V)
            pull = to_table[part].sum(-1, keepdim=True)
            if undecided:
                slope = to_entropy[part, None]
                weights = logprobs.exp()
                slopes = logprobs.mul_(slope).add_(pull + slope * entropy[part, None]).mul_(weights).neg_()
                del weights
            else:
                slopes = logprobs.exp_().mul_(-pull)
            slopes.scatter_add_(-1, table[part], to_table[part])
            if temperatures is not None:
                slopes /= temperatures[part, None]
            if by_bias is not None:
                by_bias += slopes.sum(0)
            slopes = slopes.to(hidden.dtype)
            if by_hidden is not None:
                torch.mm(slopes, weight, out=by_hidden[part])
            if by_weight is not None:
                _add_product(by_weight, slopes, hidden[part])
        return (
            by_hidden,
            None if by_weight is None else by_weight.to(weight.dtype),
            None if by_bias is None else by_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor | None, part: slice
) -> Tensor:
    """Return the logits `(C, V)` of a part of the places, in memory of their own."""
    wide = _wide(functional.linear(hidden[part], weight, bias))
    return wide if temperatures is None else wide.div_(temperatures[part, None])


def _add_product(total: Tensor, slopes: Tensor, hidden: Tensor) -> None:
    if total.dtype == slopes.dtype:
        total.addmm_(slopes.T, hidden)
    else:
        total += slopes.T @ hidden


def _cuts(count: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, count, chunk)]


def recompute(policy: nn.Module) -> None:
    """Let each block compute its activations again for its gradient, instead of keeping them.

    What transformers has for it works in training mode alone, which would bring dropout.
    """
    for module in policy.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.forward = partial(
                checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False
            )
