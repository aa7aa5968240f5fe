"""Files of a run directory are read whole or not at all."""

import asyncio
import resource
from pathlib import Path

import msgspec
import pytest

from rolloutmq.bus.rundir import load_run, read_json, read_run, wait_json, write_json
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, MissingError
from rolloutmq.schemas.files import RunLayout


def test_a_run_is_read_back_as_it_was_written(run_dir: Path) -> None:
    config = RunConfig.model_validate({"run": {"seed": 7}})
    write_json(run_dir / "config.json", config)
    found, layout = load_run(run_dir)
    assert found == config
    assert layout.root == run_dir


def test_a_directory_without_a_run_says_what_is_missing(run_dir: Path) -> None:
    with pytest.raises(MissingError, match=r"config\.json is missing"):
        load_run(run_dir)


def test_a_wrong_configuration_is_named_by_its_dotted_path(run_dir: Path) -> None:
    (run_dir / "config.json").write_text('{"broker": {"high_bytes": "many"}}')
    with pytest.raises(ConfigError, match=r"^broker\.high_bytes: "):
        load_run(run_dir)


def test_json_is_replaced_whole(run_dir: Path) -> None:
    path = run_dir / "x.json"
    assert read_json(path, dict[str, int]) is None
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert read_json(path, dict[str, int]) == {"a": 2}
    assert [entry.name for entry in run_dir.iterdir()] == ["x.json"]
    path.write_text('{"a"')
    with pytest.raises(msgspec.DecodeError):
        read_json(path, dict[str, int])


async def test_a_file_of_another_process_is_waited_for(run_dir: Path) -> None:
    path = run_dir / "x.json"
    waiting = asyncio.create_task(wait_json(path, list[int]))
    await asyncio.sleep(0)
    assert not waiting.done()
    write_json(path, [1])
    assert await waiting == [1]


def test_json_that_does_not_fit_leaves_the_old_file_and_no_other(run_dir: Path) -> None:
    path = run_dir / "x.json"
    write_json(path, {"a": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_json(path, {"a": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read_json(path, dict[str, int]) == {"a": 1}
    assert [entry.name for entry in run_dir.iterdir()] == ["x.json"]


def test_a_cut_configuration_is_named_and_not_shown(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    layout.config.write_text('{"run": {"name": "' + "x" * 5000)
    with pytest.raises(ConfigError, match=r"config\.json: invalid JSON, EOF while") as cut:
        read_run(run_dir)
    layout.config.write_text('{"run": {"seed": "' + "x" * 5000 + '"}}')
    with pytest.raises(ConfigError, match=r"^run\.seed: must be a valid integer \(got 'x+\.\.\.\)$") as wrong:
        read_run(run_dir)
    assert max(len(str(cut.value)), len(str(wrong.value))) < 400
