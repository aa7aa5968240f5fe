"""What can go wrong with memory that processes share: the errors of segments and weights, of the tree in `errors`."""

from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.errors import ResourceError, RetryableError, UsageError


class SegmentGoneError(RetryableError):
    """An address names shared memory that was removed or replaced; its owner will publish a new one."""

    def __init__(self, path: str, why: str) -> None:
        self.path = path
        self.why = why

    def __str__(self) -> str:
        return f"shared memory {self.path} is gone: {self.why}"


class WeightsTornError(RetryableError):
    """The weights are half-written and their writer is gone; they are garbage until it restored them."""

    def __init__(self, last: PolicyVersion) -> None:
        self.last = last
        """Version of the last whole write."""

    def __str__(self) -> str:
        return f"the weights are half-written since version {self.last.incarnation}.{self.last.step}"


class WeightsBusyError(RetryableError):
    """Another process kept the shared weights for too long: it is stopped or hangs."""

    def __init__(self, writer: int, waited_s: float, readers: tuple[int, ...] = ()) -> None:
        self.writer = writer
        """Process id of the writer at work or waiting, 0 for none."""
        self.waited_s = waited_s
        self.readers = readers
        """Process ids of those that read, as far as they can be seen from here."""

    def __str__(self) -> str:
        whose = f"writer {self.writer}" if self.writer else "a reader"
        if self.readers:
            whose = " and ".join(f"reader {pid}" for pid in self.readers)
        keeps = "keep" if len(self.readers) > 1 else "keeps"
        return f"the weights were not to be had within {self.waited_s:.1f} s: {whose} {keeps} them"


class WeightsSilentError(RetryableError):
    """Who shares the weights did not answer a question that it answers whenever it takes its turn at them."""

    def __init__(self, who: str, waited_s: float) -> None:
        self.who = who
        self.waited_s = waited_s

    def __str__(self) -> str:
        return f"{self.who} did not answer within {self.waited_s:.1f} s"


class WeightsDamagedError(RetryableError):
    """The files of a version of the weights are not what was published; they are refused until there is a newer one."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"the weights in {self.path} are damaged: {self.problem}"


class WeightsMismatchError(UsageError):
    """A model and a set of shared weights are not of the same tensors; nothing was attached."""

    def __init__(self, tensor: str, problem: str) -> None:
        self.tensor = tensor
        """Name of the tensor or configuration key."""
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.tensor}: {self.problem}"


class WeightsNotWrittenError(ResourceError):
    """A version of the weights could not be written to disk; what was published before is still good."""

    def __init__(self, path: str, why: str) -> None:
        self.path = path
        self.why = why

    def __str__(self) -> str:
        return f"the weights could not be written to {self.path}: {self.why}"


class WeightsNotSentError(RetryableError):
    """A server that is to have a copy of the weights did not take them."""

    def __init__(self, server: str, why: str, *, away: bool = False) -> None:
        self.server = server
        self.why = why
        self.away = away
        """It is not there, or does not answer; otherwise it has refused them, or they could not be made ready."""

    def __str__(self) -> str:
        return f"the weights did not reach {self.server}: {self.why}"


class SegmentInUseError(ResourceError):
    """The shared memory belongs to another process that lives."""

    def __init__(self, path: str, pid: int) -> None:
        self.path = path
        self.pid = pid

    def __str__(self) -> str:
        return f"shared memory {self.path} belongs to process {self.pid}, which lives"
