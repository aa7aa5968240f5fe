"""Journals that earlier versions wrote, and that a living one writes: refused by name, untouched, or read.

`earlier_versions/vN.tar.gz` has the run directory of a broker of record version N, made by the code of that version:
killed with groups queued, trained, committed and dead. Its `saved.rmq` is from a run at durability `memory`.
"""

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from tests.faults.support.processes import SEQUENCES, BrokerProcess, Trainer, config, feed, status
from tests.services.broker.journal.other_versions import listing

from rolloutmq.bus.rundir import write_json
from rolloutmq.launch.cli import main
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import PERMANENT_FAILURE
from rolloutmq.services.broker.journal.format.records import VERSION, beginning_of
from rolloutmq.services.broker.journal.read.versions import OLD_LOGS, OLD_LOGS_VERSION

EARLIER: Final = tuple(range(1, VERSION))
"""Every version before this one; a new version adds a journal of the last one."""
PACKED: Final = Path(__file__).with_name("earlier_versions")
READERS: Final[tuple[tuple[str, ...], ...]] = (
    ("ledger", "verify", "RUN"),
    ("ledger", "verify", "--quick", "--json", "RUN"),
    ("explain", "g-0", "--run-dir", "RUN"),
    ("explain", "g-0", "--json", "--run-dir", "RUN"),
    ("dead", "list", "--run-dir", "RUN"),
    ("dead", "show", "g-4", "--run-dir", "RUN"),
    ("report", "RUN"),
)


def unpacked(version: int, run_dir: Path) -> RunLayout:
    """Return the run of an earlier version, with its own configuration."""
    with tarfile.open(PACKED / f"v{version}.tar.gz") as packed:
        packed.extractall(run_dir, filter="data")
    return RunLayout(run_dir)


class Told(NamedTuple):
    """What a command answered."""

    returncode: int
    stdout: str
    stderr: str


Cli = Callable[..., Told]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """The command line, in this process."""

    def run(*arguments: str) -> Told:
        monkeypatch.setattr("sys.argv", ["rolloutmq", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Told(int(ended.value.code or 0), *capfd.readouterr())

    return run


def is_refused(told: Told, version: int, code: int) -> None:
    assert told.returncode == code, told.stderr
    last = told.stderr.splitlines()[-1]
    assert f"got version {version}, this one reads version {VERSION}" in last
    assert "nothing was changed: finish the run with the RolloutMQ that wrote them" in last
    assert "Traceback" not in told.stderr
    assert told.stdout == ""


def test_there_is_a_journal_of_every_version() -> None:
    assert [int(path.name[1:].partition(".")[0]) for path in sorted(PACKED.iterdir())] == list(EARLIER)


@pytest.mark.parametrize("version", EARLIER)
def test_the_journals_are_what_they_are_said_to_be(run_dir: Path, version: int) -> None:
    layout = unpacked(version, run_dir)
    found = [
        path for path in run_dir.rglob("*.rmq") if path.stat().st_blocks or path.stat().st_size < 1 << 16
    ]
    names = {path.name for path in found}
    log = OLD_LOGS if version <= OLD_LOGS_VERSION else "events"
    assert {"groups-00000001.rmq", f"{log}-00000001.rmq", "saved.rmq", "000000000005.rmq"} <= names
    for path in (layout.saved, layout.journal / "groups-00000001.rmq", *layout.dead.iterdir()):
        beginning = beginning_of(path.read_bytes()[:64])
        assert beginning is not None
        assert beginning.version == version


@pytest.mark.parametrize("durability", ["memory", "disk"])
@pytest.mark.parametrize("version", EARLIER)
def test_the_broker_refuses_it_and_touches_nothing(
    run_dir: Path, version: int, durability: str, cli: Cli
) -> None:
    layout = unpacked(version, run_dir)
    write_json(layout.config, config(durability=durability))
    for missing in ((), ("saved.rmq",), ("journal",), ("journal", "saved.rmq")):
        for name in missing:
            (run_dir / name).rename(run_dir.with_name(name))
        before = listing(run_dir)
        is_refused(cli("broker", "--run-dir", str(run_dir)), version, PERMANENT_FAILURE)
        assert listing(run_dir) == before
        for name in missing:
            run_dir.with_name(name).rename(run_dir / name)


@pytest.mark.parametrize("version", EARLIER)
def test_readers_refuse_it_and_touch_nothing(run_dir: Path, version: int, cli: Cli) -> None:
    layout = unpacked(version, run_dir)
    before = listing(run_dir)
    for reader in READERS[:-1]:
        is_refused(cli(*(word.replace("RUN", str(run_dir)) for word in reader)), version, 1)
        assert listing(run_dir) == before
    write_json(layout.config, config(durability="disk"))
    before = listing(run_dir)
    for reader in READERS:
        is_refused(cli(*(word.replace("RUN", str(run_dir)) for word in reader)), version, 1)
        assert listing(run_dir) == before


def test_one_of_this_version_is_read_by_all_and_lives_on(run_dir: Path, cli: Cli) -> None:
    """The same run as the packed ones: killed with groups queued, trained, committed and dead."""
    settings = config(durability="disk", segment_bytes=1 << 16, lease_s=0.5, max_deliveries=1)
    with BrokerProcess(run_dir, settings) as broker:
        feed(run_dir, [f"g-{number}" for number in range(12)], nbytes=400)
        with Trainer(run_dir, nbytes=400, sequences=2 * SEQUENCES) as trainer:
            assert trainer.train(1).ids == ("g-0", "g-1")
            trainer.commit((0, 1))
            assert trainer.train(2).ids == ("g-2", "g-3")
        for alive in (True, False):
            if not alive:
                broker.kill()
            for reader in (READERS[0], READERS[2]):
                told = cli(*(word.replace("RUN", str(run_dir)) for word in reader))
                assert told.returncode == 0, (told.stdout, told.stderr)
        broker.start()
        assert status(run_dir).pressure.ledger.queued == 8
