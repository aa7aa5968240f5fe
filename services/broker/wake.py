"""Waking a thread that waits in a poll: a descriptor that becomes readable."""

import os


class Wake:
    """An eventfd. `set` is for any thread and for signal handlers."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        """Make the descriptor readable."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make it unreadable again; nothing happens if it is."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self._fd)
