"""Log-probabilities of the trained tokens, without a `[tokens, vocabulary]` table of logits.

    tokens -> blocks of the policy -> hidden states of the trained tokens -> chunk by chunk: head, softmax

For 4,096 tokens and a vocabulary of 32,000 one such table takes half a gigabyte, and the plain computation has several:
logits, log-probabilities, and the gradients of both. Here only one chunk of logits exists at a time. The backward pass
recomputes it: one more matrix product, repaid by fewer passes over memory. Where the policy is coarser than float32,
the head may still compute in float32 (`policy.head`).

A head that is more than a linear layer (Gemma caps its logits, Cohere scales them) cannot be split that way; the scorer
probes it with two tokens when it is made. Such a policy runs whole, but its head sees only the hidden states of the
trained tokens.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from rolloutmq.trainer.policy.head import float32_head, wide_logits, widened

logger = logging.getLogger(__name__)

_PROBE: Final = ((0, 1),)
_PROBE_TOLERANCE: Final = 1e-3


class LogprobScorer(nn.Module):
    """Scores tokens with a causal language model. A module, so that FSDP can wrap it whole.

    With `fp32_head` the logits of a coarser policy are computed in float32.
    """

    def __init__(
        self,
        policy: nn.Module,
        logits_bytes: int,
        *,
        recompute_blocks: bool = False,
        fp32_head: bool = False,
    ) -> None:
        super().__init__()
        self.policy = policy
        self._logits_bytes = logits_bytes
        self._fp32_head = fp32_head
        self._takes_head_apart = _has_plain_head(policy)
        self.packs = _can_share_rows(policy)
        """Whether the policy keeps sequences that share a row apart."""
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
        """Return log-probabilities of tokens and the entropy of the policy at their positions.

        Right padding needs no attention mask: a causal model looks back only, and padding lies ahead.

        Args:
            tokens: `(B, T)` token ids, padded on the right.
            rows: `(N,)` row of each token to score.
            positions: `(N,)` its position in the row, at least 1.
            position_ids: `(B, T)` position of each token in its own sequence, if sequences share rows. They do not
                attend to each other.
            also: `(N, K)` alternative tokens to score at each position.
            temperatures: `(N,)` float32, divisors of the logits; None means 1.

        Returns:
            `(N,)` log-probabilities and `(N,)` entropies in nats, float32 or wider, with gradient. With
            `also` the former are
            `(N, 1 + K)`, the actual token first.
        """
        inputs = {"input_ids": tokens[:, :-1], "use_cache": False}
        if position_ids is not None:
            inputs["position_ids"] = position_ids[:, :-1]
        asked, before = tokens[rows, positions], positions - 1  # (N,)
        if also is not None:
            asked = torch.cat([asked[:, None], also], -1)  # (N, 1 + K)
        head = self.policy.get_output_embeddings()  # type: ignore[operator]
        if not self._takes_head_apart:
            wide = float32_head(self.policy) if self._fp32_head else nullcontext()
            with wide, _shown_only(head, rows, before):
                (logits,) = self.policy(**inputs).logits  # (N, V)
            return score_logits(logits, asked, temperatures)
        hidden = self.policy.base_model(**inputs).last_hidden_state  # type: ignore[operator]  # (B, T - 1, H)
        return score_hidden(
            hidden[rows, before], head, asked, self._logits_bytes, temperatures, fp32_head=self._fp32_head
        )

    def idle(self) -> None:
        """Take part in a pass without trained tokens: its gradients are zero."""
        tokens, rows, positions = torch.zeros(1, 2, dtype=torch.long), torch.tensor([0]), torch.tensor([1])
        logprobs, entropy = self(tokens, rows, positions)
        (0.0 * (logprobs.sum() + entropy.sum())).backward()


@contextmanager
def _shown_only(head: nn.Module, rows: Tensor, places: Tensor) -> Iterator[None]:
    """Let the head see only some hidden states, as one row `(1, N, H)`; the policy works by token after it.

    `logits_to_keep` of transformers keeps the same positions in all rows, which does not fit here.
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
    """Score tokens with all logits at once, for small inputs. See `LogprobScorer.forward`."""
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
    return logits.to(widened(logits.dtype))


def _has_plain_head(policy: nn.Module) -> bool:
    """Return whether the logits are exactly the output of a linear head."""
    head = policy.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear:
        kind = type(head).__name__
        logger.info("logits not chunked, the head is not linear kind=%s", kind)
        return False
    with torch.no_grad():
        probe = {"input_ids": torch.tensor(_PROBE, device=head.weight.device), "use_cache": False}
        whole = policy(**probe).logits.float()
        parts = head(policy.base_model(**probe).last_hidden_state).float()  # type: ignore[operator]
    # Bit for bit: a cap changes small logits by little.
    if not torch.equal(whole, parts):
        logger.info("logits not chunked, the policy changes them after the head")
        return False
    return True


def _can_share_rows(policy: nn.Module) -> bool:
    """Return whether restarting positions are enough for the policy to keep sequences apart."""
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
    # Neighbours change nothing, to the last bit, and the logits equal those without neighbours.
    kept_apart = torch.equal(shared, beside)
    if not (kept_apart and torch.allclose(shared, alone, rtol=_PROBE_TOLERANCE, atol=_PROBE_TOLERANCE)):
        logger.info("packing disabled, the policy mixes sequences that share a row")
        return False
    return True


def score_hidden(
    hidden: Tensor,
    head: nn.Linear,
    asked: Tensor,
    logits_bytes: int,
    temperatures: Tensor | None = None,
    *,
    fp32_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """Score tokens `(N,)` or `(N, A)` by the hidden states `(N, H)` before them.

    At most `logits_bytes` of logits exist at once. With `fp32_head` they are never rounded to a coarser type.
    """
    each = head.out_features * max(hidden.element_size(), torch.float32.itemsize)
    chunk = max(1, logits_bytes // each)
    return _ChunkedScores.apply(  # type: ignore[no-any-return,no-untyped-call]
        hidden, head.weight, head.bias, asked, temperatures, chunk, fp32_head
    )


class _ChunkedScores(torch.autograd.Function):
    """Log-probabilities and entropies at `N` positions, for one or several tokens at each.

    With logits z, L = log sum exp z, log-probabilities l = z - L, p = exp l and the entropy E = -sum p l:

        d l[a] / d z = 1[a] - p                d E / d z = -p (l + E)

    At temperature T, z is the head's output over T, and its gradient is divided by T once more.
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
        fp32_head: bool,
    ) -> tuple[Tensor, Tensor]:
        kind = widened(hidden.dtype)
        table = _table(asked)  # (N, A)
        sums, entropy = (hidden.new_empty(len(asked), dtype=kind) for _ in range(2))
        chosen = hidden.new_empty(asked.shape, dtype=kind)
        by_place = _table(chosen)  # (N, A)
        for part in _cuts(len(asked), chunk):
            logits = _logits(hidden, weight, bias, temperatures, part, fp32_head)
            highest = logits.amax(-1, keepdim=True)
            by_place[part] = logits.gather(-1, table[part])
            weights = logits.sub_(highest).exp()
            total = weights.sum(-1)
            sums[part] = total.log() + highest.squeeze(-1)
            inner = torch.bmm(weights[:, None], logits[:, :, None]).flatten()
            entropy[part] = total.log() - inner / total
        by_place -= sums[:, None]
        ctx.save_for_backward(hidden, weight, bias, asked, temperatures, sums, entropy)
        ctx.chunk, ctx.fp32_head = chunk, fp32_head
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient an output
        ctx: Any, to_chosen: Tensor, to_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, asked, temperatures, sums, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        # Sums over chunks are wide: rounding to bfloat16 after each would lose small parts.
        by_weight = torch.zeros_like(weight, dtype=sums.dtype) if wants_weight else None
        by_bias = torch.zeros_like(bias, dtype=sums.dtype) if wants_bias else None
        by_hidden = torch.empty_like(hidden) if wants_hidden else None
        undecided = bool(to_entropy.any())
        table, to_table = _table(asked), to_chosen.reshape(len(asked), -1)  # (N, A)
        for part in _cuts(len(asked), ctx.chunk):
            logits = _logits(hidden, weight, bias, temperatures, part, ctx.fp32_head)
            logprobs = logits.sub_(sums[part, None])  # (C, V)
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
            None,
        )


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperatures: Tensor | None,
    part: slice,
    fp32_head: bool,
) -> Tensor:
    """Return the logits `(C, V)` of a chunk, in new memory."""
    if fp32_head and hidden.dtype != widened(hidden.dtype):
        wide = wide_logits(hidden[part], weight, bias)
    else:
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
    """Let each block recompute its activations in the backward pass instead of storing them.

    The switch of transformers works in training mode only, which would enable dropout.
    """
    for module in policy.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.forward = partial(
                checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False
            )
