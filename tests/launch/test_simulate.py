import json
from pathlib import Path

import pytest

from rolloutmq.launch.simulate import simulate
from rolloutmq.schemas.errors import ConfigError


def test_a_table_has_a_line_for_each_law(capsys: pytest.CaptureFixture[str]) -> None:
    simulate([20.0], 1, ["noise"], None, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [
        ["noise", "20", "s", "rolloutmq"],
        ["noise", "20", "s", "ratio"],
        ["noise", "20", "s", "pid"],
    ]
    assert "breaks" not in lines[1]
    assert "breaks" in lines[3]


def test_a_recorded_demand_is_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = tmp_path / "mine.csv"
    recorded.write_text("seconds,sequences per second\n100,10\n200,30\n400,30\n")
    simulate([2.0, 20.0], 1, [], recorded, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [(one["scenario"], one["start_s"], one["law"]) for one in found] == [
        ("mine.csv", start_s, law) for start_s in (2.0, 20.0) for law in ("rolloutmq", "ratio", "pid")
    ]
    assert {one["ideal"] for one in found} == {15}
    assert found[0]["peak"]["worst"] <= 18


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1,2\n",
        "a,b\n1,x\n",
        "1,2\n1,3\n",
        "2,1\n1,1\n",
        "1,-2\n3,4\n",
        "1,nan\n3,4\n",
        "1,2\n1e300,4\n",
        "1\n2\n",
    ],
)
def test_a_trace_that_makes_no_sense_is_refused(text: str, tmp_path: Path) -> None:
    recorded = tmp_path / "bad.csv"
    recorded.write_text(text)
    with pytest.raises(ConfigError):
        simulate([20.0], 1, [], recorded, as_json=False)


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no 'storm'"):
        simulate([20.0], 1, ["storm"], None, as_json=False)
    with pytest.raises(ConfigError):
        simulate([float("nan")], 1, [], None, as_json=False)
    with pytest.raises(ConfigError):
        simulate([20.0], 1, [], tmp_path / "missing.csv", as_json=False)
