"""The error tree, divided by what the caller can do; `docs/reference/errors.md` lists every class.

    RolloutMQError
    ├── RetryableError     the call is correct: try again
    ├── GivenUpError       the call can no longer succeed: stop, or open a new client
    ├── UsageError         the caller's data or code is wrong
    ├── WireError          the peer sent bytes that break the protocol
    └── ResourceError      something on this machine is missing, damaged or in use

Exceptions carry fields and build their own text: `key: what is wrong (got X); what to do`. Over the wire an error is an
`ErrorCode` and that text.
"""

import copyreg
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from rolloutmq.schemas.wire.distillation import TeacherLogprobs
from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion


class RolloutMQError(Exception):
    """Base of every error that this package raises on purpose. Each can be pickled and copied."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class RetryableError(RolloutMQError):
    """The call is correct and may succeed later."""


class BrokerUnavailableError(RetryableError):
    """The broker did not answer within the deadline."""

    def __init__(self, address: str, waited_s: float) -> None:
        self.address, self.waited_s = address, waited_s

    def __str__(self) -> str:
        return f"broker: no answer from {self.address} within {self.waited_s:.1f} s; check that its process is alive"


class KeyRefusedError(BrokerUnavailableError):
    """The broker did not let the client in: its key is revoked, unknown, missing, or that of another run."""

    def __init__(self, address: str, waited_s: float, problem: str) -> None:
        super().__init__(address, waited_s)
        self.problem = problem

    def __str__(self) -> str:
        return f"broker: {self.problem}"


class WaitTimeoutError(RetryableError, TimeoutError):
    """A call waited for longer than its `timeout_s`."""

    def __init__(self, what: str, waited_s: float, problem: str) -> None:
        self.what = what
        """What waited, for example `send`."""
        self.waited_s = waited_s
        self.problem = problem
        """What was missing, and where it was looked for."""

    def __str__(self) -> str:
        return f"{self.what}: not done within timeout_s of {self.waited_s:.1f} s: {self.problem}"


class PolicyUnavailableError(RetryableError):
    """The inference server did not answer within the deadline, over all attempts."""

    def __init__(self, address: str, waited_s: float, last: str) -> None:
        self.address, self.waited_s = address, waited_s
        self.last = last
        """Error of the last attempt."""

    def __str__(self) -> str:
        problem = f"no answer from {self.address}" if self.address else "no inference server was found"
        return (
            f"policy: {problem} within {self.waited_s:.1f} s (last error: {self.last}); "
            "check the log of the inference server"
        )


class RatersMissingError(RetryableError):
    """Too few raters gave a rating, so an answer has no score; the task may be tried again."""

    def __init__(self, ensemble: str, got: int, wanted: int, last: str) -> None:
        self.ensemble, self.got, self.wanted, self.last = ensemble, got, wanted, last

    def __str__(self) -> str:
        why = self.last or "no rater had an opinion"
        return (
            f"{self.ensemble}: too few ratings of an answer (got {self.got}, min_raters {self.wanted}): {why}"
        )


class JournalWaitsError(RetryableError):
    """The journal lacks disk space, memory, a descriptor or access to a file; it continues once it has it."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.problem}; free or repair it: nothing is lost, and the broker then continues"
        )


class GivenUpError(RolloutMQError):
    """The call can no longer succeed in this session."""


class SessionFencedError(GivenUpError):
    """A newer session of the same producer registered; this one may not send any more."""

    def __init__(self, producer: str, session: int) -> None:
        self.producer, self.session = producer, session

    def __str__(self) -> str:
        return (
            f"producer {self.producer}: session {self.session} is fenced by a newer session of that name; "
            "give each producer its own name"
        )


class ConsumerFencedError(GivenUpError):
    """Another process registered under the name of this consumer; this one gets no more batches."""

    def __init__(self, consumer: str) -> None:
        self.consumer = consumer

    def __str__(self) -> str:
        return (
            f"consumer {self.consumer}: another process registered under this name and took over its batches; "
            "end one of the two; ranks of one trainer need a `rank` and a `consumer=` each"
        )


class UnackedError(GivenUpError):
    """A producer closed before the broker acked all its groups; without an ack they may be lost."""

    SHOWN: ClassVar[int] = 10
    """Most ids in the text."""

    def __init__(self, producer: str, group_ids: Sequence[str], why: str) -> None:
        self.producer = producer
        self.group_ids = tuple(group_ids)
        """Ids of all unacked groups, in the order of their sending."""
        self.why = why

    def __str__(self) -> str:
        count, shown = len(self.group_ids), ", ".join(self.group_ids[: self.SHOWN])
        rest = f" and {count - self.SHOWN} more" if count > self.SHOWN else ""
        return (
            f"producer {self.producer}: {count} groups are not acked and may be lost ({self.why}): {shown}{rest}; "
            "send them again, or give save_to to keep such groups, or a longer drain_s"
        )


class LeaseLostError(GivenUpError):
    """The leased step went back to the queue; its work is void."""

    def __init__(self, lease: int, why: str) -> None:
        self.lease, self.why = lease, why

    def __str__(self) -> str:
        return f"lease {self.lease}: lost ({self.why}); discard the work of its step and pull again"


class EndOfReplayError(GivenUpError):
    """The broker replays a recorded run and has delivered every batch of it."""


class DrainingError(GivenUpError):
    """The worker is draining: finish the rollouts in progress and start nothing new."""

    def __str__(self) -> str:
        return "draining: no new rollout may start; finish those in progress"


class ClosedError(GivenUpError):
    """The client is closed, or was never opened."""

    def __init__(self, problem: str = "client: closed; open a new one") -> None:
        self.problem = problem

    def __str__(self) -> str:
        return self.problem


class UsageError(RolloutMQError):
    """The caller's data or code is wrong; retrying cannot help."""


class ConfigError(UsageError):
    """A configuration key is unknown, has the wrong type, or contradicts another."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        """Dotted path of the key, for example `broker.high_bytes`."""
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class InvalidGroupError(UsageError):
    """The columns of a trajectory group contradict each other or have an unusable type."""

    def __init__(self, column: str, problem: str) -> None:
        self.column, self.problem = column, problem

    def __str__(self) -> str:
        return f"column {self.column}: {self.problem}"


class GroupTooLargeError(UsageError):
    """A group is larger than the broker or the producer's spool accepts."""

    def __init__(self, nbytes: int, limit: int) -> None:
        self.nbytes, self.limit = nbytes, limit

    def __str__(self) -> str:
        return (
            f"group: too large (got {self.nbytes} bytes, limit {self.limit}); "
            "make it smaller, or raise broker.max_group_bytes and the producer's spool_bytes"
        )


class RefusedError(UsageError):
    """The broker refused the request."""

    def __init__(self, code: ErrorCode, detail: str) -> None:
        self.code, self.detail = code, detail

    def __str__(self) -> str:
        return f"broker: request refused ({self.code.value}): {self.detail}"


class PolicyRefusedError(UsageError):
    """The inference server refused the request, or its answer cannot be used; a retry cannot help."""

    def __init__(self, status: int, detail: str) -> None:
        self.status = status
        """HTTP status; 200 where the answer itself is unusable."""
        self.detail = detail

    def __str__(self) -> str:
        return f"policy: {_refusal(self.status)}: {self.detail}"


def _refusal(status: int) -> str:
    return "unusable answer" if status == 200 else f"request refused with status {status}"


class ForkedError(UsageError):
    """A client was used in a forked child; only the process that opened it has its sockets and threads."""

    def __init__(self, client: str, owner: int) -> None:
        self.client = client
        self.owner = owner
        """Process id that opened the client."""

    def __str__(self) -> str:
        return (
            f"{self.client}: opened by process {self.owner} and used in a forked child of it; "
            "open another one in the child, or start the child with multiprocessing's `spawn`"
        )


class EnvironmentFailedError(UsageError):
    """An environment failed `failure_limit` times in a row, so its worker gives up."""

    def __init__(self, env: str, failures: int, last: str) -> None:
        self.env, self.failures, self.last = env, failures, last

    def __str__(self) -> str:
        return f"environment.{self.env}: {self.failures} rollouts in a row failed, the last with: {self.last}"


class WorkersFailedError(UsageError):
    """Every worker of an environment failed for good, so the run cannot continue."""

    def __init__(self, env: str, worker: str, reason: str) -> None:
        self.env, self.worker, self.reason = env, worker, reason

    def __str__(self) -> str:
        return f"environment.{self.env}: all workers failed; {self.worker}: {self.reason}"


class NothingToLearnError(UsageError):
    """Many batches in a row had no learning signal, so the trainer takes no step."""

    def __init__(self, batches: int, last: str) -> None:
        self.batches, self.last = batches, last

    def __str__(self) -> str:
        return f"trainer: {self.batches} batches in a row had nothing to learn from, the last: {self.last}"


class WireError(RolloutMQError):
    """The peer sent bytes that break the protocol."""

    code = ErrorCode.MALFORMED

    def __init__(self, detail: str) -> None:
        self.detail = detail

    def __str__(self) -> str:
        return self.detail


class MalformedError(WireError):
    """The bytes do not decode, or decode to impossible values."""


class LimitExceededError(WireError):
    """A size, a count or a depth exceeds its limit; nothing was decoded."""

    code = ErrorCode.LIMIT

    def __init__(self, what: str, value: int, limit: int) -> None:
        super().__init__(f"{what}: above the limit (got {value}, limit {limit})")
        self.what, self.value, self.limit = what, value, limit


class VersionMismatchError(WireError):
    """The peer speaks another version of the protocol."""

    code = ErrorCode.VERSION

    def __init__(self, theirs: int, ours: int) -> None:
        super().__init__(
            f"protocol: the peer speaks another version (got {theirs}, this side speaks {ours}); "
            "run the same version of RolloutMQ on both sides"
        )
        self.theirs = theirs
        self.ours = ours


class ChecksumError(WireError):
    """The checksum of a body differs from the one in its header."""


class ResourceError(RolloutMQError):
    """Something on this machine is missing, damaged or in use."""


class RunDirInUseError(ResourceError):
    """Another process uses this run directory.

    Attributes:
        path: The directory.
        owner: What the process is, for example `rolloutmq up`.
        pid: Its process id; 0 if unknown.
        since: Its start, wall-clock seconds; 0.0 if unknown.
        remedy: What to do; empty for `rolloutmq down`.
    """

    def __init__(self, path: str, owner: str, pid: int = 0, since: float = 0.0, remedy: str = "") -> None:
        self.path = path
        self.owner = owner
        self.pid = pid
        self.since = since
        self.remedy = remedy

    def __str__(self) -> str:
        from rolloutmq.schemas.printable import moment, shell_word  # not for everybody who imports an error

        when = f" since {moment(self.since)}" if self.since else ""
        who = f"process {self.pid} ({self.owner})" if self.pid else self.owner
        down = f"stop that run with `rolloutmq down {shell_word(self.path)}`, or choose another run directory"
        return f"run directory {self.path} is in use by {who}{when}; {self.remedy or down}"


class UnusablePathError(ResourceError):
    """The file system refuses to read or write a file or directory.

    Attributes:
        what: What it is, with its path.
        problem: The refusal, as the system words it.
    """

    def __init__(self, what: str, problem: str) -> None:
        self.what, self.problem = what, problem

    def __str__(self) -> str:
        return (
            f"{self.what}: cannot be used ({self.problem}); make it readable and writable for this user and make room "
            "on its disk, or choose another"
        )


class NotPrivateError(ResourceError):
    """Another user owns a run directory or a file in it, or may write in it, and could redirect what a run writes.

    Attributes:
        path: The directory or file.
        problem: Who may do what.
        remedy: What to do.
    """

    def __init__(self, path: str, problem: str, remedy: str) -> None:
        self.path, self.problem, self.remedy = path, problem, remedy

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}; {self.remedy}"


class OutputFailedError(ResourceError):
    """Standard output takes nothing more, for example because its disk is full."""

    def __init__(self, problem: str) -> None:
        self.problem = problem

    def __str__(self) -> str:
        return f"standard output: cannot be written ({self.problem}); make room, or redirect it elsewhere"


class AddressInUseError(ResourceError):
    """Another process is bound to this address."""

    def __init__(
        self,
        address: str,
        owner: str = "another process",
        remedy: str = "end that process, or choose another address",
    ) -> None:
        self.address, self.owner, self.remedy = address, owner, remedy

    def __str__(self) -> str:
        return f"address {self.address} is in use by {self.owner}; {self.remedy}"


class DamagedFileError(ResourceError):
    """A line of a file of the run does not decode, and is not the torn last line of a killed process."""

    def __init__(self, path: str, line: int, problem: str) -> None:
        self.path, self.line, self.problem = path, line, problem

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.problem}"


class DamagedRecordError(ResourceError):
    """A record of the journal fails its checksum; it is quarantined."""

    def __init__(self, path: str, offset: int) -> None:
        super().__init__(f"{path}: the record at {offset} is damaged")


class DamagedJournalError(ResourceError):
    """The journal is so damaged that the rest contradicts itself; nothing was changed."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"journal: {problem}; run `rolloutmq ledger verify` to list what is missing")


class RecordVersionError(ResourceError):
    """Another version of RolloutMQ wrote this file. The file is not damaged and was not changed."""

    def __init__(
        self,
        path: str,
        theirs: int,
        ours: int,
        remedy: str = "finish the run with the RolloutMQ that wrote them, or start in another run directory",
    ) -> None:
        self.path = path
        self.theirs = theirs
        self.ours = ours
        self.remedy = remedy

    def __str__(self) -> str:
        return (
            f"{self.path}: another version of RolloutMQ wrote these records (got version {self.theirs}, this one reads "
            f"version {self.ours}); nothing was changed: {self.remedy}"
        )


class JournalFailedError(ResourceError):
    """The disk failed a write or a sync, so the broker ends."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}; acked groups are safe: repair the disk and start the run again")


class MissingError(ResourceError):
    """This machine lacks a file, a package or a device that the run needs."""

    def __init__(self, what: str, remedy: str, problem: str = "is missing") -> None:
        self.what, self.remedy, self.problem = what, remedy, problem

    def __str__(self) -> str:
        return f"{self.what} {self.problem}: {self.remedy}"


class PackageMissingError(MissingError):
    """This machine lacks a package that a process needs; no restart helps before somebody installs it."""


def install_remedy(extra: str) -> str:
    """Return how to install an optional part; torch for CPUs is a thirtieth of the build that pip takes by itself."""
    cpu = "; without a GPU first run pip install torch --index-url https://download.pytorch.org/whl/cpu"
    return f"run pip install 'rolloutmq[{extra}]'{cpu if extra == 'trainer' else ''}"


class TasksFullError(RetryableError):
    """Too many tasks are open; some must end first."""

    def __init__(self, retry_s: float, detail: str) -> None:
        self.retry_s = retry_s
        """Seconds until there may be room, estimated from the tasks that ended recently."""
        self.detail = detail

    def __str__(self) -> str:
        return f"tasks: too many are open ({self.detail}); try again in {self.retry_s:.1f} s"


class InvalidTaskError(UsageError):
    """A task cannot be sent: its payload or one of its fields is invalid."""

    def __init__(self, task: str, problem: str) -> None:
        self.task = task
        self.problem = problem

    def __str__(self) -> str:
        return f"task {self.task}: {self.problem}"


class TokenizerMismatchError(ConfigError):
    """Teacher and student mean different tokens by the same ids, so the student cannot learn from it."""

    def __init__(self, problem: str) -> None:
        super().__init__("teacher", problem)

    @classmethod
    def of(cls, teacher: str, student: str) -> Self:
        """Build the error from two fingerprints; an empty one means that there is no tokenizer."""
        theirs, own = (text[:16] or "none" for text in (teacher, student))
        return cls(
            f"its tokenizer differs from the student's (got fingerprint {theirs}, the student has {own}); "
            "use a teacher with the student's tokenizer"
        )


class VocabularyMismatchError(ConfigError):
    """`full` compares whole vocabularies, and those of teacher and student differ in size."""

    CODE: ClassVar[str] = "vocabulary_mismatch"
    """Error code in a teacher's refusal."""

    def __init__(self, problem: str) -> None:
        super().__init__("teacher", problem)

    @classmethod
    def of(cls, teacher: int, student: int) -> Self:
        """Build the error from two vocabulary sizes."""
        return cls(
            f"its vocabulary differs from the student's (got {teacher} token ids, the student has {student}); "
            'trainer.distillation.kind = "full" compares whole vocabularies: use "top_k" or "sampled"'
        )

    @classmethod
    def check(cls, teacher_logprobs: TeacherLogprobs, teacher: int, student: int) -> None:
        """Raise VocabularyMismatchError for `full` if both sizes are known (not 0) and differ."""
        if teacher_logprobs is TeacherLogprobs.FULL and teacher and student and teacher != student:
            raise cls.of(teacher, student)


class TeacherFailedError(RetryableError):
    """The teacher answered, but failed on one group in every attempt; other groups may succeed."""

    def __init__(self, times: int, last: str) -> None:
        self.times = times
        self.last = last
        """Error of the last attempt."""

    def __str__(self) -> str:
        return f"teacher: failed {self.times} times on a group, the last with: {self.last}"


class TeacherRefusedError(UsageError):
    """The teacher refused the request, or its answer cannot be used; a retry cannot help."""

    def __init__(self, status: int, why: str) -> None:
        self.status = status
        self.why = why

    def __str__(self) -> str:
        return f"teacher: {_refusal(self.status)}: {self.why}"


class SegmentGoneError(RetryableError):
    """An address names shared memory that was removed or replaced; its owner will publish a new one."""

    def __init__(self, path: str, why: str) -> None:
        self.path, self.why = path, why

    def __str__(self) -> str:
        return f"shared memory {self.path}: gone ({self.why}); retry once its owner has published a new one"


class WeightsTornError(RetryableError):
    """The weights are half-written and their writer is dead; they are unusable until a trainer restores them."""

    def __init__(self, last: PolicyVersion) -> None:
        self.last = last
        """Version of the last complete write."""

    def __str__(self) -> str:
        version = f"{self.last.incarnation}.{self.last.step}"
        return f"weights: half-written since version {version}; they become usable when the trainer restores them"


class WeightsBusyError(RetryableError):
    """Another process held the lock of the shared weights too long: it is stopped or hangs."""

    def __init__(self, writer: int, waited_s: float, readers: tuple[int, ...] = ()) -> None:
        self.writer = writer
        """Process id of the writer that holds or awaits the lock, 0 for none."""
        self.waited_s = waited_s
        self.readers = readers
        """Process ids of the readers that are visible from this process."""

    def __str__(self) -> str:
        whose = f"writer {self.writer}" if self.writer else "a reader"
        if self.readers:
            whose = " and ".join(f"reader {pid}" for pid in self.readers)
        holds = "hold" if len(self.readers) > 1 else "holds"
        return f"weights: no lock within {self.waited_s:.1f} s, {whose} {holds} it; check whether that process hangs"


class WeightsSilentError(RetryableError):
    """A process that shares the weights did not answer a challenge in time."""

    def __init__(self, who: str, waited_s: float) -> None:
        self.who = who
        self.waited_s = waited_s

    def __str__(self) -> str:
        return f"{self.who} did not answer within {self.waited_s:.1f} s"


class WeightsDamagedError(RetryableError):
    """The files of a weight version differ from what was published; readers refuse them and wait for a newer one."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path}: the weights are damaged: {self.problem}; readers wait for a newer version"


class WeightsMismatchError(UsageError):
    """A model and a weight share have different tensors; nothing was attached."""

    def __init__(self, tensor: str, problem: str) -> None:
        self.tensor = tensor
        """Name of the tensor or configuration key."""
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.tensor}: {self.problem}"


class WeightsNotWrittenError(ResourceError):
    """A weight version could not be written to disk; the version published before stays valid."""

    def __init__(self, path: str, why: str) -> None:
        self.path, self.why = path, why

    def __str__(self) -> str:
        return f"{self.path}: the weights could not be written: {self.why}; the published version stays valid"


class WeightsNotSentError(RetryableError):
    """An inference server did not receive its copy of the weights."""

    def __init__(self, server: str, why: str, *, away: bool = False) -> None:
        self.server = server
        self.why = why
        self.away = away
        """The server does not answer. False: it refused the weights, or they could not be prepared."""

    def __str__(self) -> str:
        return f"weights: not sent to {self.server}: {self.why}"


class SegmentInUseError(ResourceError):
    """Another live process owns the shared memory."""

    def __init__(self, path: str, pid: int) -> None:
        self.path, self.pid = path, pid

    def __str__(self) -> str:
        return f"shared memory {self.path}: in use by process {self.pid}; end that process first"
