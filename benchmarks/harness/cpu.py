"""CPU time of another process, from the kernel's clock of it: in nanoseconds, where `/proc/PID/stat` has hundredths of
a second. It counts all threads, also those that have ended, in user and in kernel mode.
"""

import time
from typing import Final

_SCHED: Final = 2
"""`CPUCLOCK_SCHED` of the kernel: the time that the scheduler gave to a process."""


def spent_s(pid: int) -> float:
    """Return the seconds of CPU of a process of this machine so far; OSError if there is none of that id."""
    return time.clock_gettime(~pid << 3 | _SCHED)
