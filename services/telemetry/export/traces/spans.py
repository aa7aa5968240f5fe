"""The spans of one group: a tree from its task to the checkpoint that covers it. Pure.

    group                     the whole way
      task                    submission to the begin of the rollout, if it answers a submitted task
      rollout                 with a span `call` for each call to an inference server
      send, queue, train, commit

At durability `memory` nobody tells the way of single groups: then a trace has the rollout and its calls alone.

Ids are hashes of the id of the group, so that the same group has the same trace whoever sends it, and twice is once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rolloutmq.schemas.wire.tracing import Call, RolloutTrace, digest_of
from rolloutmq.services.broker.journal.inspect.group_traces import GroupTrace

ROOT: Final = "group"
Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Span:
    """One span.

    Attributes:
        trace_id, span_id: Its ids, as OpenTelemetry has them.
        parent_id: Span around it; 0 for the root.
        name: Its name.
        began_at, ended_at: Wall-clock seconds.
        attributes: Facts about it.
        problem: Why it failed; empty if it did not.
    """

    trace_id: int
    span_id: int
    parent_id: int
    name: str
    began_at: float
    ended_at: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    problem: str = ""


def spans_of(trace: GroupTrace, run: str, rollout: RolloutTrace | None = None) -> list[Span]:
    """Return the spans of a group, the root first.

    Args:
        trace: Its way through the broker.
        run: Name of the run.
        rollout: Calls of its rollout, if the worker told them.
    """
    tree = _GroupTree(trace, rollout)
    spans = [*tree.parts()]
    if not spans:
        return []
    began_at = min(span.began_at for span in spans)
    ended_at = max(span.ended_at for span in spans)
    return [tree.root(began_at, ended_at, run), *spans]


def rollout_spans_of(rollout: RolloutTrace, run: str) -> list[Span]:
    """Return the spans of the rollout of a group of which nothing else is known, the root first.

    Args:
        rollout: Its calls; without one nothing is known of its begin, and there are no spans.
        run: Name of the run.
    """
    if not rollout.calls:
        return []
    tree = _Tree(rollout.group_id)
    began_at = min(call.began_at for call in rollout.calls)
    ended_at = max(rollout.at, *(call.began_at + call.seconds for call in rollout.calls))
    attributes: dict[str, Value] = {
        "rolloutmq.run": run,
        "rolloutmq.group": rollout.group_id,
        "rolloutmq.environment": rollout.env,
        "rolloutmq.producer": rollout.worker,
        "rolloutmq.partial": True,
    }
    root = tree.span(ROOT, began_at, ended_at, attributes, parent_id=0)
    span = tree.span("rollout", began_at, ended_at)
    return [root, span, *tree.calls(span.span_id, rollout.calls)]


class _Tree:
    """Spans of one group."""

    def __init__(self, group_id: str) -> None:
        self._group_id = group_id
        self._trace_id = trace_id_of(group_id)
        self._names: dict[str, int] = {}

    def calls(self, parent_id: int, calls: Sequence[Call]) -> Iterator[Span]:
        for call in calls:
            attributes: dict[str, Value] = {
                "rolloutmq.engine": call.engine,
                "url.path": call.path,
                "gen_ai.usage.input_tokens": call.prompt_tokens,
                "gen_ai.usage.output_tokens": call.tokens,
            }
            if call.status:
                attributes["http.response.status_code"] = call.status
            problem = "" if call.status == 200 else f"status {call.status}" if call.status else "no answer"
            yield self.span(
                "call",
                call.began_at,
                call.began_at + call.seconds,
                attributes,
                parent_id=parent_id,
                problem=problem,
            )

    def span(
        self,
        name: str,
        began_at: float,
        ended_at: float,
        attributes: Mapping[str, Value] | None = None,
        *,
        parent_id: int | None = None,
        problem: str = "",
    ) -> Span:
        number = self._names[name] = self._names.get(name, 0) + 1
        return Span(
            trace_id=self._trace_id,
            span_id=span_id_of(self._group_id, name, number),
            parent_id=span_id_of(self._group_id, ROOT, 1) if parent_id is None else parent_id,
            name=name,
            began_at=began_at,
            ended_at=ended_at,
            attributes=attributes or {},
            problem=problem,
        )


class _GroupTree(_Tree):
    """Spans of a group whose way through the broker is known."""

    def __init__(self, trace: GroupTrace, rollout: RolloutTrace | None) -> None:
        super().__init__(trace.header.group_id)
        self._trace = trace
        self._rollout = rollout

    def root(self, began_at: float, ended_at: float, run: str) -> Span:
        trace, header = self._trace, self._trace.header
        attributes: dict[str, Value] = {
            "rolloutmq.run": run,
            "rolloutmq.group": header.group_id,
            "rolloutmq.environment": trace.env,
            "rolloutmq.split": trace.split.name.lower(),
            "rolloutmq.producer": trace.producer,
            "rolloutmq.sequences": header.sequences,
            "rolloutmq.tokens": header.tokens,
            "rolloutmq.reward": header.rewards.mean,
            "rolloutmq.policy_step": header.oldest.step,
            "rolloutmq.outcome": trace.outcome,
        }
        if header.task:
            attributes["rolloutmq.task"] = header.task
        problem = "" if trace.outcome in {"", "committed", "filtered"} else trace.outcome
        return self.span(ROOT, began_at, ended_at, attributes, parent_id=0, problem=problem)

    def parts(self) -> Iterator[Span]:
        header, submitted_at = self._trace.header, self._trace.submitted_at
        if submitted_at is not None and header.started_at:
            ended_at = max(header.started_at, submitted_at)
            yield self.span("task", submitted_at, ended_at, {"rolloutmq.task": header.task})
        for part in self._trace.parts:
            span = self.span(part.hop.value, part.began_at, part.ended_at)
            yield span
            if part.hop == "rollout" and self._rollout is not None:
                yield from self.calls(span.span_id, self._rollout.calls)


def trace_id_of(group_id: str) -> int:
    """Return the 128-bit id of the trace of a group; never 0."""
    return int.from_bytes(digest_of(group_id)[8:24]) or 1


def span_id_of(group_id: str, name: str, number: int) -> int:
    """Return the 64-bit id of a span of a group; never 0."""
    return int.from_bytes(digest_of(f"{group_id}\0{name}\0{number}")[:8]) or 1
