"""The status of a run as an object: for a notebook, a debugger, or a program of one's own."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rolloutmq.schemas.errors import MissingError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.printable import html_table, printable_lines
from rolloutmq.services.monitor.liveness import RunLiveness, fate_of
from rolloutmq.services.monitor.status.ended import LABEL_CHARS, ended_text, read_summary
from rolloutmq.services.monitor.status.status import described, heard

LINES: Final = 100
"""Most lines in a notebook."""


@dataclass(frozen=True, slots=True, repr=False)
class RunStatus:
    """State of a run at one moment. In a notebook it is a table, as text the lines of `rolloutmq status`.

    Attributes:
        run_dir: The run directory.
        life: `living`, `ended`, `dead` (its launcher was killed) or `absent` (nothing runs, and no summary is there).
        text: Lines of a label and a text.
        figures: The fields of `rolloutmq status --json`; without a broker and a summary only `life` and `ended`.
    """

    run_dir: Path
    life: str
    text: str
    figures: Mapping[str, Any]

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        """Return the lines as a table, for a notebook."""
        rows = [(line[:LABEL_CHARS].strip(), line[LABEL_CHARS:]) for line in self.text.splitlines()]
        return html_table(f"Status of {self.run_dir}", (), rows, len(rows), LINES)


def run_status(run_dir: str | Path) -> RunStatus:
    """Return the state of a run, whoever started it, and the reasons why its processes wait.

    Blocks for at most six seconds; an answer of the broker takes milliseconds. Reads only.

    Args:
        run_dir: Run directory of a run that lives or has ended.

    Raises:
        MissingError: The directory is missing.
        BrokerUnavailableError: The broker runs, and does not reply.
    """
    layout = RunLayout(Path(run_dir))
    if not layout.root.is_dir():
        raise MissingError(f"run directory {layout.root}", "start a run with `rolloutmq up CONFIG`")
    fate = fate_of(layout)
    figures: Mapping[str, Any]
    if (reply := heard(layout, fate)) is not None:
        text, figures = described(layout, fate, reply)
    elif fate.life is RunLiveness.ENDED:
        summary = read_summary(layout)
        text = ended_text(layout, fate, summary)
        figures = {"life": fate.life, "ended": fate.told, "summary": summary}
    else:
        text, figures = f"{'run':<{LABEL_CHARS}}{fate.say(layout)}", {"life": fate.life, "ended": ""}
    return RunStatus(layout.root, str(figures["life"]), printable_lines(text), figures)
