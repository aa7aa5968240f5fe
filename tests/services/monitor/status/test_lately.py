"""`status` shows what training showed last, and reads no more than that."""

from collections.abc import Callable

import pytest

from rolloutmq.bus.encoding import topics
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.control import Pressure, StepDone
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.schemas.wire.telemetry import Event
from rolloutmq.schemas.wire.training import BatchSettled, StepFigures
from rolloutmq.services.monitor.report.history import decoded
from rolloutmq.services.monitor.status import lately as module
from rolloutmq.services.monitor.status.lately import RECENT, Lately, read_lately
from rolloutmq.services.telemetry.recorder import line_of

MakeStep = Callable[..., StepDone]
LONG = 2000


def record(layout: RunLayout, *lines: tuple[float, Event]) -> None:
    layout.metrics.write_bytes(b"".join(line_of(topics.STEP, event, at) for at, event in lines))


def found(name: str, *, ended: bool = False) -> HealthFinding:
    return HealthFinding(env="e", at=0.0, finding=name, problem="" if ended else "found", ended=ended)


def logged(step: int, **figures: float) -> StepFigures:
    return StepFigures(run="r", incarnation=0, step=step, at=0.0, figures=figures)


def test_what_training_showed_last(
    layout: RunLayout, make_step: MakeStep, make_settled: Callable[..., BatchSettled]
) -> None:
    assert read_lately(layout) == Lately()
    record(
        layout,
        (1.0, make_step(1, 0.25, loss=2.0, extra={"kl": 0.5, "short": 1.0})),
        (2.0, found("collapse")),
        (2.0, found("drift")),
        (2.0, found("held")),
        (3.0, found("drift", ended=True)),
    )
    lately = read_lately(layout)
    assert lately.step is not None
    assert (lately.step.reward, dict(lately.figures)) == (0.25, {"loss": 2.0, "kl": 0.5})
    assert lately.findings == (found("collapse"),)
    own = StepFigures(run="r", incarnation=0, step=9, at=0.0, figures={"loss": 0.5}, not_finite=("kl",))
    record(layout, (1.0, make_settled(9, 0.75)), (1.0, own))
    lately = read_lately(layout)
    assert lately.step is not None
    assert (lately.step.step, dict(lately.figures), lately.not_finite) == (9, {"loss": 0.5}, ("kl",))


def test_a_long_record_is_not_decoded(
    layout: RunLayout,
    make_step: MakeStep,
    make_pressure: Callable[..., Pressure],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only what is shown: the last steps, and every finding, however long ago it was told."""
    steps = [(float(number), make_step(number, loss=float(number))) for number in range(LONG)]
    record(layout, (0.0, found("collapse")), *steps, *[(9.0, make_pressure())] * LONG)
    lines: list[bytes] = []

    def counted(line: bytes) -> object:
        lines.append(line)
        return decoded(line)

    monkeypatch.setattr(module, "decoded", counted)
    lately = read_lately(layout)
    assert (lately.step, lately.figures["loss"]) == (steps[-1][1], LONG - 1.0)
    assert lately.findings == (found("collapse"),)
    assert len(lines) == RECENT + 1


def test_the_end_of_a_long_file_begins_with_a_whole_line(
    layout: RunLayout, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(layout, (0.0, found("collapse")), *((float(number), make_step(number)) for number in range(100)))
    monkeypatch.setattr(module, "END_BYTES", layout.metrics.stat().st_size // 10)
    lately = read_lately(layout)
    assert lately.step is not None
    assert lately.step.step == 99
    assert lately.findings == (), "it is told again, if it lasts"


def test_the_last_value_of_a_figure_counts(
    layout: RunLayout, make_settled: Callable[..., BatchSettled]
) -> None:
    """A trainer may log some figures less often than others, and takes no step with some batches."""
    batches = [(1.0, make_settled(4, stepped=False))] * (2 * RECENT)
    record(
        layout,
        (1.0, logged(1, loss=0.5, kl=0.25)),
        (1.0, make_settled(3, 0.75)),
        (1.0, logged(2, loss=0.125)),
    )
    assert dict(read_lately(layout).figures) == {"loss": 0.125, "kl": 0.25}
    with layout.metrics.open("ab") as file:
        file.writelines(line_of(topics.STEP, event, at) for at, event in batches)
    step = read_lately(layout).step
    assert step is not None
    assert step.step == 3


@pytest.mark.parametrize(
    "line",
    [
        '{"t":1.0,"topic":"step","kind":"step_done","extra":[1]}\n',
        '{"t":1' + "0" * 400 + ',"topic":"step","kind":"step_done"}\n',
        '{"t":1.0,"topic":"step","kind":"step_done","extra":{"kl":1' + "0" * 400 + "}}\n",
        '{"t":1.0,"topic":"step","kind":"step_done", torn',
        "\n\n" + "x" * 1000 + '"kind":"step_done"\n',
    ],
)
def test_a_damaged_line_is_passed_over(layout: RunLayout, make_step: MakeStep, line: str) -> None:
    record(layout, (1.0, make_step(1)))
    with layout.metrics.open("a") as file:
        file.write(line)
    step = read_lately(layout).step
    assert step is not None
    assert step.step == 1


def test_steps_far_before_the_end_are_found_up_to_a_limit(
    layout: RunLayout,
    make_step: MakeStep,
    make_pressure: Callable[..., Pressure],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with 150 environments, whose state fills the end of the record between two steps."""
    for name, nbytes in (("END_BYTES", 4000), ("BLOCK_BYTES", 3000), ("SEARCHED_BYTES", 60_000)):
        monkeypatch.setattr(module, name, nbytes)
    state = [line_of(topics.PRESSURE, make_pressure(), 9.0)]
    steps = [
        line_of(topics.STEP, make_step(number, 0.5, extra={"kl": number}), 1.0) for number in range(1, 4)
    ]
    between = state * (20_000 // len(state[0]))
    layout.metrics.write_bytes(b"".join([*steps[:1], *between, *steps[1:], *between]))
    lately = read_lately(layout)
    assert lately.step is not None
    assert (lately.step.step, dict(lately.figures)["kl"]) == (3, 3.0)
    layout.metrics.write_bytes(b"".join([*steps, *between, *between, *between, *between]))
    assert read_lately(layout) == Lately()
