import os
from pathlib import Path

from rolloutmq.services.broker.io import fd_guard


def test_descriptors_are_counted_as_they_are() -> None:
    listed = len(list(Path("/proc/self/fd").iterdir()))
    before = fd_guard._used()
    opened = [os.dup(0) for _ in range(50)]
    try:
        assert fd_guard._used() - before == 50
    finally:
        for descriptor in opened:
            os.close(descriptor)
    assert abs(listed - before) <= 1, "the directory is open while it is listed"
