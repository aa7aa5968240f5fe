"""What a command has kept of the run before: set aside once the address serves a fresh run of the same name.

    joined-NAME.run     id of the run that the command's programs take part in
    earlier/ID/         what they had of the run of that id: unsent groups, checkpoints. Nothing of it is used again

Nothing is mixed with the fresh run, and nothing is deleted, as when `up` begins a fresh run in a directory. A command
sets aside only what its own programs write, once they have ended: others of this host may use the same directory.
"""

import logging
from pathlib import Path
from typing import Final

from rolloutmq.bus.files import PRIVATE_DIRECTORY, read_regular, write_private
from rolloutmq.schemas.files import RunLayout

logger = logging.getLogger(__name__)

FOLDER: Final = "earlier"
WORKERS: Final = ("spools", "acks")
"""What workers write."""
TRAINER: Final = ("checkpoints", "trained.jsonl")
"""What a trainer writes, besides the weights."""


class EarlierRun:
    """The state of one command in the directory of a run of another host.

    Args:
        layout: The directory.
        name: Name of the command's programs on this host.
        own: Files and folders that they write.
    """

    def __init__(self, layout: RunLayout, name: str, own: tuple[str, ...]) -> None:
        self._layout = layout
        self._marker = layout.root / f"joined-{name}.run"
        self._own = own

    def _known(self) -> str:
        try:
            return read_regular(self._marker).decode("ascii", "replace").strip()
        except FileNotFoundError:
            return ""

    def is_of_another(self, run_id: str) -> bool:
        """Return whether the command took part in another run before."""
        return self._known() not in {"", run_id}

    def begin(self, run_id: str) -> None:
        """Take part in a run; set aside what is there of another one. No program of the command may run.

        Raises:
            OSError: The directory cannot be written.
        """
        if self.is_of_another(run_id):
            self._set_aside(self._known())
        write_private(self._marker, run_id.encode())

    def _set_aside(self, run_id: str) -> None:
        found = [path for name in self._own if _has_content(path := self._layout.root / name)]
        if not found:
            return
        folder, number = self._layout.root / FOLDER / run_id[:8], 1
        while folder.exists():  # it took part in that run twice
            number += 1
            folder = folder.with_name(f"{run_id[:8]}.{number}")
        folder.mkdir(mode=PRIVATE_DIRECTORY, parents=True)
        for path in found:
            is_folder = path.is_dir()
            path.rename(folder / path.name)
            if is_folder:
                path.mkdir(mode=PRIVATE_DIRECTORY)
        unsent = sum(1 for _ in (folder / "spools").glob("*"))
        logger.warning(
            "files of a run that is gone are set aside directory=%s names=%s files of unsent groups=%d; the groups "
            "belong to that run, and no other one takes them",
            folder,
            ",".join(path.name for path in found),
            unsent,
        )


def _has_content(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(path.iterdir()))
