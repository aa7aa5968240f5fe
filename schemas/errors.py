"""The error tree, split by what the caller can do about it.

    RolloutMQError
    ├── RetryableError            nothing is wrong with the call: try again
    │   ├── BrokerUnavailableError     no answer within the deadline
    │   ├── PolicyUnavailableError     the inference server did not come back in time
    │   ├── TeacherFailedError         the teacher is there, and failed on a group again and again
    │   └── JournalWaitsError          the journal lacks room, memory or a descriptor
    ├── GivenUpError              the call can no longer succeed: stop, or start afresh
    │   ├── SessionFencedError         a newer session of this producer took over
    │   ├── LeaseLostError             the step went back to the queue; its work is void
    │   ├── EndOfReplayError           every recorded batch was served
    │   ├── RankLostError              another rank of the trainer ended
    │   ├── DrainingError              told to stop: start nothing new
    │   └── ClosedError                the client was closed
    ├── UsageError                the caller's own data or code is wrong
    │   ├── ConfigError                a key of the configuration
    │   │   ├── TokenizerMismatchError     teacher and student mean different tokens by the same ids
    │   │   └── VocabularyMismatchError    they know different numbers of ids, and all are to be compared
    │   ├── TeacherRefusedError        the teacher does not accept these sequences
    │   ├── InvalidGroupError          a trajectory group that contradicts itself
    │   ├── GroupTooLargeError         a group no credit could ever cover
    │   ├── WeightsMismatchError       two sides of shared weights mean different tensors
    │   ├── RefusedError               the broker does not accept this request
    │   ├── PolicyRefusedError         the inference server does not accept this prompt
    │   ├── EnvironmentFailedError     an environment that only ever fails
    │   ├── WorkersFailedError         no worker of an environment can work
    │   └── NothingToLearnError        batch after batch without a signal
    ├── WireError                 the peer sent bytes that are not of this protocol
    │   ├── MalformedError
    │   ├── LimitExceededError
    │   ├── VersionMismatchError
    │   └── ChecksumError
    └── ResourceError             something of this machine is missing or taken
        ├── RunDirInUseError
        ├── AddressInUseError
        ├── SegmentInUseError          another living process owns the shared memory
        ├── DamagedFileError, DamagedRecordError, DamagedJournalError
        ├── JournalFailedError         the disk failed, and nothing more can be promised
        └── MissingError

Exceptions carry fields and build their own text. Over the wire an error is an `ErrorCode` and that text.
"""

import time
from enum import StrEnum


class ErrorCode(StrEnum):
    """Why a request was not granted; the value travels in `ErrorReply.code`."""

    MALFORMED = "malformed"
    LIMIT = "limit"
    VERSION = "version"
    FENCED = "fenced"
    LEASE_LOST = "lease_lost"
    UNKNOWN = "unknown"
    """The request names a producer, consumer, lease or worker that the broker does not know."""
    CONFLICT = "conflict"
    """The request contradicts what is already agreed, for example another world size for a step."""
    INVALID = "invalid"


class RolloutMQError(Exception):
    """Base of every error that this package raises on purpose."""


class RetryableError(RolloutMQError):
    """Nothing is wrong with the call; the same call may succeed later."""


class BrokerUnavailableError(RetryableError):
    """No answer from the broker within the deadline."""

    def __init__(self, address: str, waited_s: float) -> None:
        self.address = address
        self.waited_s = waited_s

    def __str__(self) -> str:
        return f"no answer from the broker at {self.address} within {self.waited_s:.1f} s"


class PolicyUnavailableError(RetryableError):
    """The inference server gave no answer within the deadline, over all attempts."""

    def __init__(self, address: str, waited_s: float, last: str) -> None:
        self.address = address
        self.waited_s = waited_s
        self.last = last
        """What went wrong with the last attempt."""

    def __str__(self) -> str:
        where = self.address or "an address that nobody has written yet"
        return f"no answer from the policy at {where} within {self.waited_s:.1f} s: {self.last}"


class JournalWaitsError(RetryableError):
    """The journal lacks what somebody else can give back: room on the disk, memory, or a descriptor."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}; nothing is lost, and it may go on as soon as there is some"


class GivenUpError(RolloutMQError):
    """The call can no longer succeed in this session."""


class SessionFencedError(GivenUpError):
    """A newer session of the same producer registered; this one may send nothing more."""

    def __init__(self, producer: str, session: int) -> None:
        self.producer = producer
        self.session = session

    def __str__(self) -> str:
        return f"session {self.session} of producer {self.producer} is fenced by a newer one"


class LeaseLostError(GivenUpError):
    """The leased step was returned to the queue; whatever was computed from it is void."""

    def __init__(self, lease: int, why: str) -> None:
        self.lease = lease
        self.why = why

    def __str__(self) -> str:
        return f"lease {self.lease} is lost: {self.why}"


class EndOfReplayError(GivenUpError):
    """The broker serves a recorded run, and the record is at its end."""


class DrainingError(GivenUpError):
    """The worker is draining: finish what is in hand and start nothing new."""

    def __str__(self) -> str:
        return "draining: no new rollout may start"


class ClosedError(GivenUpError):
    """The client was closed."""

    def __str__(self) -> str:
        return "the client is closed"


class UsageError(RolloutMQError):
    """The caller's own data or code is wrong; retrying cannot help."""


class ConfigError(UsageError):
    """A configuration key is unknown, of a wrong type, or contradicts another."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        """Dotted path of the key, for example `broker.high_bytes`."""
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class InvalidGroupError(UsageError):
    """The columns of a trajectory group contradict each other or have an unusable type."""

    def __init__(self, column: str, problem: str) -> None:
        self.column = column
        self.problem = problem

    def __str__(self) -> str:
        return f"column {self.column}: {self.problem}"


class GroupTooLargeError(UsageError):
    """A group is larger than any credit could ever cover."""

    def __init__(self, nbytes: int, limit: int) -> None:
        self.nbytes = nbytes
        self.limit = limit

    def __str__(self) -> str:
        return f"a group of {self.nbytes} bytes exceeds the limit of {self.limit}"


class RefusedError(UsageError):
    """The broker refused the request."""

    def __init__(self, code: ErrorCode, detail: str) -> None:
        self.code = code
        self.detail = detail

    def __str__(self) -> str:
        return f"refused ({self.code.value}): {self.detail}"


class PolicyRefusedError(UsageError):
    """The inference server does not accept the request, or its answer cannot be used; asking again cannot help."""

    def __init__(self, status: int, detail: str) -> None:
        self.status = status
        """HTTP status; 200 where the answer itself is unusable."""
        self.detail = detail

    def __str__(self) -> str:
        return f"the policy refused ({self.status}): {self.detail}"


class EnvironmentFailedError(UsageError):
    """An environment came to nothing so many times in a row that trying on makes no sense."""

    def __init__(self, env: str, failures: int, last: str) -> None:
        self.env = env
        self.failures = failures
        self.last = last

    def __str__(self) -> str:
        return f"environment.{self.env}: {self.failures} rollouts in a row came to nothing, the last: {self.last}"


class WorkersFailedError(UsageError):
    """Every worker of an environment was given up, so the run cannot go on."""

    def __init__(self, env: str, worker: str, reason: str) -> None:
        self.env = env
        self.worker = worker
        self.reason = reason

    def __str__(self) -> str:
        return f"environment {self.env}: all its workers failed; {self.worker}: {self.reason}"


class NothingToLearnError(UsageError):
    """Batch after batch gave no signal, so the trainer takes no step and never will."""

    def __init__(self, batches: int, last: str) -> None:
        self.batches = batches
        self.last = last

    def __str__(self) -> str:
        return f"{self.batches} batches in a row had nothing to learn from, the last: {self.last}"


class WireError(RolloutMQError):
    """The peer sent bytes that are not of this protocol."""

    code = ErrorCode.MALFORMED

    def __init__(self, detail: str) -> None:
        self.detail = detail

    def __str__(self) -> str:
        return self.detail


class MalformedError(WireError):
    """The bytes do not decode, or decode to values that cannot be."""


class LimitExceededError(WireError):
    """A frame, a count or a depth is above its limit; nothing was decoded."""

    code = ErrorCode.LIMIT

    def __init__(self, what: str, value: int, limit: int) -> None:
        super().__init__(f"{what} is {value}, above the limit of {limit}")
        self.what = what
        self.value = value
        self.limit = limit


class VersionMismatchError(WireError):
    """The peer speaks another version of the protocol."""

    code = ErrorCode.VERSION

    def __init__(self, theirs: int, ours: int) -> None:
        super().__init__(f"protocol version {theirs}, this side speaks {ours}")
        self.theirs = theirs
        self.ours = ours


class ChecksumError(WireError):
    """A body does not have the checksum that its header names."""


class ResourceError(RolloutMQError):
    """Something of this machine is missing or taken."""


class RunDirInUseError(ResourceError):
    """Somebody else lives in this run directory.

    Attributes:
        path: The directory.
        owner: What it is.
        pid: Its process; 0 if nobody knows.
        since: When it came, wall clock; 0.0 if nobody knows.
    """

    def __init__(self, path: str, owner: str, pid: int = 0, since: float = 0.0) -> None:
        self.path = path
        self.owner = owner
        self.pid = pid
        self.since = since

    def __str__(self) -> str:
        when = time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(self.since)) if self.since else ""
        who = f"process {self.pid} ({self.owner})" if self.pid else self.owner
        return f"run directory {self.path} is in use by {who}{when}"


class AddressInUseError(ResourceError):
    """Another process is bound to this address."""

    def __init__(self, address: str, owner: str = "another process") -> None:
        self.address = address
        self.owner = owner

    def __str__(self) -> str:
        return f"address {self.address} is in use by {self.owner}"


class DamagedFileError(ResourceError):
    """A line of a file of the run does not decode, and not as its end that a kill tore: what follows would be wrong."""

    def __init__(self, path: str, line: int, problem: str) -> None:
        self.path = path
        self.line = line
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.problem}"


class DamagedRecordError(ResourceError):
    """What is read back from the journal is not what was written; it is kept aside."""

    def __init__(self, path: str, offset: int) -> None:
        super().__init__(f"{path}: the record at {offset} is damaged")


class DamagedJournalError(ResourceError):
    """So much of the journal is damaged that what is left contradicts itself; nothing was changed."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; `rolloutmq ledger verify` names what is missing")


class JournalFailedError(ResourceError):
    """The disk failed to write or to sync: nothing more can be promised, and the broker ends."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}; what was acked before is safe, nothing was acked since")


class MissingError(ResourceError):
    """Something that should be on this machine is not."""

    def __init__(self, what: str, remedy: str) -> None:
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what} is missing: {self.remedy}"
