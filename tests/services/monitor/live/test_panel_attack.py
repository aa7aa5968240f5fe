"""Any keys, any names and any size of the terminal: the picture fits, obeys nothing, and nothing is ordered unasked."""

import io
import random
import string
from collections.abc import Callable
from typing import Final

import pytest
from rich.cells import cell_len
from rich.console import Console

from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.printable import printable
from rolloutmq.schemas.wire.control import Pressure, WorkerState, WorkerStatus
from rolloutmq.schemas.wire.hardware import Cause, GpuStanding
from rolloutmq.services.monitor.live import keys, view
from rolloutmq.services.monitor.live.orders import Answer
from rolloutmq.services.monitor.live.panel import Panel
from rolloutmq.services.monitor.live.run_state import GroupEnd, RunState

PIECES: Final = (
    *("\x1b[2J", "\x1b]0;x\x07", "\x9b31m", "\u202e", "\u2028", "\t", "\n", "\r", "\x00", "\u200b"),
    *("漢字", "👩", "e\u0301\u0301", "ﷺ", "🇩🇪", "ก็็", "a" * 40, "--help", "[red]", "[/]", "%s", "{x}", "\\"),
)
SPECIAL: Final = (
    *(keys.UP, keys.DOWN, keys.LEFT, keys.RIGHT, keys.PAGE_UP, keys.PAGE_DOWN, keys.HOME, keys.END),
    *(keys.ENTER, keys.ESCAPE, keys.TAB, keys.BACK_TAB, keys.BACKSPACE, "ctrl-d", "ctrl-l", "ctrl-u"),
)
KEYS: Final = (*SPECIAL * 3, *string.printable.strip(), *"jkgG1234sS/dcey+-=p?h" * 3, "漢", "👩")
SIZES: Final = ((80, 23), (40, 9), (200, 59), (20, 5), (5, 2), (2, 3), (1, 1))
STEPS: Final = 60


class Stranger:
    """Changes the run at random, and types at random."""

    def __init__(
        self,
        seed: int,
        make_pressure: Callable[..., Pressure],
        make_worker: Callable[..., WorkerStatus],
    ) -> None:
        self.random = random.Random(seed)
        self.panel = Panel()
        self.board = RunState.of(RunConfig(environment={"sort3": EnvironmentConfig(entry="a:B")}))
        self.now = 100.0
        self._make_pressure, self._make_worker = make_pressure, make_worker
        self._names = [self.name() for _ in range(self.random.choice((1, 3, 60, 1000)))]

    def name(self) -> str:
        return "".join(self.random.choices(PIECES, k=self.random.randint(1, 5)))

    def change(self) -> None:
        """Let workers, groups, GPUs or troubles change."""
        pick = self.random
        self.now += pick.choice((0.0, 0.25, 5.0))
        match pick.randrange(8):
            case 0:
                names = dict.fromkeys(pick.sample(self._names, pick.randint(0, len(self._names))))
                workers = tuple(map(self._worker, names))
                self.board.feed(self._make_pressure(workers=workers), self.now)
            case 1:
                count = pick.randint(0, 30)
                self.board.groups = [GroupEnd(self.name(), self.name(), self.now) for _ in range(count)]
            case 2:
                causes = (Cause.MANUAL,) if pick.random() < 0.5 else ()
                standing = GpuStanding(
                    uuid=self.name(), host="", name=self.name(), at=0.0, causes=causes, reason=self.name()
                )
                self.board.feed(standing, self.now)
            case 3:
                self.board.notice, self.board.record = self.name(), self.name()

    def _worker(self, name: str) -> WorkerStatus:
        pick = self.random
        state = pick.choice(list(WorkerState))
        fields = {"env": pick.choice(("sort3", name)), "error": pick.choice(("", self.name()))}
        return self._make_worker(name, state=state, produced=pick.choice((0, 10**15)), **fields)

    def type(self) -> None:
        """Type a key; an order may be answered before the next one."""
        key = self.random.choice(KEYS)
        order = self.panel.press(key, self.now)
        assert order is None or order.command == "explain" or key in "yY", "ordered without a yes"
        if self.panel.running is not None and self.random.random() < 0.5:
            text = "\n".join(self.name() for _ in range(self.random.choice((0, 1, 90))))
            self.panel.take(self.panel.running, Answer(self.random.choice((0, 1)), text), self.now)

    def drawn(self, width: int, height: int) -> list[str]:
        out = io.StringIO()
        console = Console(file=out, width=width, height=height + 1, color_system=None, legacy_windows=False)
        console.print(view.frame(self.board, self.now, width, height, self.panel), end="")
        return out.getvalue().removesuffix("\n").split("\n")


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_typed_and_named_the_picture_fits(
    seed: int, make_pressure: Callable[..., Pressure], make_worker: Callable[..., WorkerStatus]
) -> None:
    stranger = Stranger(seed, make_pressure, make_worker)
    for _ in range(STEPS):
        stranger.change()
        stranger.type()
        width, height = stranger.random.choice(SIZES)
        lines = stranger.drawn(width, height)
        assert len(lines) <= height
        for line in lines:
            assert cell_len(line) <= width
            assert printable(line) == line
