"""Curricula as lines and as JSON."""

from pathlib import Path
from typing import Any

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.telemetry import CurriculumProgress
from rolloutmq.services.monitor.status.curricula import figures, line, read_curricula


def progress(**changes: Any) -> CurriculumProgress:
    fields: dict[str, Any] = {
        "env": "sort",
        "sampler": "learnability",
        "at": 5.0,
        "levels": 4,
        "open": 8,
        "drawn": 1242,
        "outcomes": 1234,
        "flat": 370,
        "success": 0.451,
        "flat_share": 0.12,
        "level": 2.34,
    }
    return CurriculumProgress(**(fields | changes))


def test_a_line_has_the_sampler_and_what_came_of_its_tasks() -> None:
    assert line(progress()) == (
        "sort: learnability, 1,234 groups, 30% without spread; "
        "recently success 0.45, 12% without spread, level 2.3 of 0 to 3"
    )
    assert line(progress(levels=1)).endswith("recently success 0.45, 12% without spread")
    assert "1 tasks failed, 2 tasks dropped" in line(progress(failed=1, dropped=2))


def test_before_the_first_outcome_there_are_no_means() -> None:
    fresh = progress(outcomes=0, flat=0, success=None, flat_share=None, level=None)
    assert line(fresh) == "sort: learnability, 0 groups"


def test_the_file_is_read_and_may_be_missing_or_damaged(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    assert read_curricula(layout) == ()
    write_json(layout.curriculum, [progress()])
    assert read_curricula(layout) == (progress(),)
    layout.curriculum.write_text("[1]")
    assert read_curricula(layout) == ()


def test_json_is_by_environment() -> None:
    plain = figures((progress(), progress(env="other", outcomes=3)))
    assert sorted(plain) == ["other", "sort"]
    assert plain["other"]["outcomes"] == 3
    assert {"kind", "env"}.isdisjoint(plain["sort"])
