"""A short session has all phases, and the rows of a session are those of its phases."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.end_to_end import panel
from benchmarks.end_to_end.page_client import PageClient
from benchmarks.end_to_end.panel import Phase, Session
from benchmarks.harness.row import Row
from benchmarks.harness.stage import StageError
from rolloutmq.schemas.files import RunLayout

WITHOUT = Phase(is_open=False, lasted_s=50.0, telemetry_s=0.5, recorded=700_000)
WITH = Phase(
    is_open=True,
    lasted_s=50.0,
    telemetry_s=0.6,
    dashboard_s=0.9,
    opening=200_000,
    later=196_000,
    updates=50,
    recorded=700_000,
    resident=140_000_000,
)
SESSION = Session(500.0, (WITHOUT, WITH, WITH, WITHOUT), linked_s=0.5, opened_s=0.6)
CPU = "CPU of telemetry and dashboard with a page open, above telemetry alone, % of a core, disk"


def rows(session: Session) -> dict[str, Row]:
    return {row.figure: row for row in panel.judged(session)}


def ended(**changes: Any) -> Session:
    """The session, with another last phase of a page."""
    return replace(SESSION, phases=(WITHOUT, WITH, replace(WITH, **changes), WITHOUT))


def test_the_cost_is_what_a_page_takes_above_telemetry_alone() -> None:
    row = rows(SESSION)[CPU]
    assert (row.ours, row.rival, row.met) == (2.0, 1.0, True)
    assert row.payload == "3 minutes, 500 a second of groups of 8 x 1,861 tokens, 134 kB"
    assert rows(ended(dashboard_s=1.8))[CPU].ours == 2.9
    assert rows(ended(dashboard_s=2.0))[CPU].met is False


@pytest.mark.parametrize(
    ("figure", "changes"),
    [
        ("sent to a page, kB an update, disk", {"later": 320_000}),
        ("memory of telemetry and dashboard, MB, disk", {"resident": 220_000_000}),
        ("record of a run, kB/s, disk", {"recorded": 900_000}),
    ],
)
def test_what_grows_is_unmet(figure: str, changes: dict[str, Any]) -> None:
    assert rows(SESSION)[figure].met is True
    assert rows(ended(**changes))[figure].met is False


@pytest.mark.extended
def test_a_short_session_plays_every_phase(tmp_path: Path) -> None:
    session = panel.session(tmp_path, phases=4, phase_s=2.0, settle_s=1.0, rate=20.0)
    assert [phase.is_open for phase in session.phases] == [*panel.TURNS]
    assert all(phase.telemetry_s > 0 for phase in session.phases)
    for phase in session.of(is_open=True):
        assert phase.dashboard_s > 0
        assert phase.updates >= 2
        assert phase.opening > phase.later > 0
        assert phase.resident > 0
    assert 0 < session.linked_s < session.opened_s
    assert sum(phase.recorded for phase in session.phases) > 0
    assert [row.figure for row in panel.judged(session)]


def test_a_load_below_the_rate_ends_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panel, "trained", lambda _layout: 7)  # nothing more is trained
    with pytest.raises(StageError, match=r"the load was .* groups a second instead of 2000"):
        panel.session(tmp_path, phases=1, phase_s=0.1, settle_s=0.1, rate=2000.0)


def test_trained_groups_are_those_of_the_last_state_of_the_queue(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    line = '{"t":1,"kind":"pressure","ledger":{"trained":%d}}\n'
    layout.metrics.write_text(line % 1 + line % 2 + '{"kind":"host_sample"}\n{"kind":"pressure","led')
    assert panel.trained(layout) == 2
    layout.metrics.write_text("")
    assert panel.trained(layout) == 0


def test_without_a_link_there_is_no_page() -> None:
    with pytest.raises(StageError, match=re.escape("the dashboard printed no link (got '')")):
        PageClient("")
