"""Disk room at both ends of a broker's life: waited for at the start, returned after a kill."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from tests.faults.support.processes import (
    LIMIT_S,
    SEQUENCES,
    BrokerProcess,
    Child,
    Trainer,
    config,
    feed,
    may_mount,
    small_disk,
    status,
    wait_until,
)

from rolloutmq.bus.lifecycle import FAILED
from rolloutmq.bus.rundir import write_json
from rolloutmq.launch.local import SERVICE_GRACE_S
from rolloutmq.launch.rundir import trim_journal
from rolloutmq.schemas.config.orchestrator import OrchestratorConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import PERMANENT_FAILURE, ProcessSpec, Role
from rolloutmq.services.broker.journal.journal import START_PATIENCE_S

NBYTES: Final = 40_000
SEGMENT_BYTES: Final = 16 << 20
FILL: Final = 'head -c 1G /dev/zero > "$0/ballast" 2>/dev/null; exec "$@"'
"""Takes all the room of the directory that is its first argument, and becomes the rest of them."""
IMPATIENT: Final = """
import sys
from pathlib import Path
from rolloutmq.services.broker.journal import journal
from rolloutmq.services.broker.server import main
journal.START_PATIENCE_S = 0.5
sys.exit(main(Path(sys.argv[1])))
"""


def names(count: int) -> list[str]:
    return [f"g-{number}" for number in range(count)]


def full_disk(layout: RunLayout, mount: list[str]) -> list[str]:
    """Return the command that gives a process a journal on a disk without any room."""
    if not may_mount():
        pytest.skip("this user may not mount a file system of its own")
    write_json(layout.config, config(durability="disk", segment_bytes=SEGMENT_BYTES))
    return [*mount, "sh", "-c", FILL, str(layout.journal)]


def test_a_broker_waits_for_room_at_its_start(run_dir: Path) -> None:
    layout, log = RunLayout(run_dir), run_dir.with_name("broker.log")
    with (
        small_disk(run_dir, 8) as mount,
        Child(log, "broker", run_dir, wrap=full_disk(layout, mount)) as broker,
    ):
        wait_until(lambda: "journal waits for room" in broker.tail(), "a broker that waits")
        assert not layout.endpoints.exists()
        (Path(f"/proc/{broker.pid}/root") / layout.journal.relative_to("/") / "ballast").unlink()
        feed(run_dir, names(4), nbytes=NBYTES)
        broker.signal(signal.SIGTERM)
        assert broker.wait() == 0, broker.tail()


def test_a_broker_that_found_no_room_at_its_start_is_started_again(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    with small_disk(run_dir, 8) as mount:
        command = [*full_disk(layout, mount), sys.executable, "-c", IMPATIENT, str(run_dir)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == FAILED, ended.stderr
    assert FAILED not in ProcessSpec(name="broker", role=Role.BROKER, argv=("b",), log="l").hopeless
    assert "No space left" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("below", ["", "journal", "sockets"])
def test_a_read_only_disk_is_said_in_one_line(run_dir: Path, below: str) -> None:
    if not may_mount():
        pytest.skip("this user may not mount a file system of its own")
    layout = RunLayout(run_dir)
    write_json(layout.config, config(durability="disk"))
    layout.journal.mkdir()
    layout.sockets.mkdir()
    place = run_dir / below
    script = f'mount --bind "{place}" "{place}" && mount -o remount,ro,bind "{place}" && exec "$@"'
    command = ["unshare", "-Urm", "sh", "-c", script, "sh", sys.executable, "-c", IMPATIENT, str(run_dir)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert "Traceback" not in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert "Read-only file system" in last
    if below == "journal":
        assert ended.returncode == PERMANENT_FAILURE, ended.stderr
        assert last.startswith(f"error: {layout.journal}: ")
        assert "repair the disk and start the run again" in last
    else:
        assert ended.returncode == FAILED, ended.stderr
        assert last.startswith(f"error: run directory {run_dir}: cannot be used")
        assert "make it readable and writable" in last


def test_longest_wait_for_room_counts_as_no_crash() -> None:
    assert OrchestratorConfig().stable_s < START_PATIENCE_S < SERVICE_GRACE_S


def test_room_of_a_killed_broker_goes_back_when_the_run_ends(run_dir: Path) -> None:
    ids, layout = names(24), RunLayout(run_dir)
    with BrokerProcess(run_dir, config(durability="disk", segment_bytes=SEGMENT_BYTES)) as broker:
        feed(run_dir, ids, nbytes=NBYTES)
        wait_until(lambda: room(layout) >= 2 * SEGMENT_BYTES, "the next segment")
        trim_journal(layout)
        assert room(layout) >= 2 * SEGMENT_BYTES  # it lives
        broker.kill()
        assert room(layout) >= 2 * SEGMENT_BYTES
        trim_journal(layout)
        assert room(layout) < len(ids) * NBYTES + (2 << 20)
        broker.start()
        with Trainer(run_dir, nbytes=NBYTES, sequences=len(ids) * SEQUENCES) as trainer:
            assert trainer.train(1).ids == tuple(ids)
        assert status(run_dir).journal.quarantined == 0


def room(layout: RunLayout) -> int:
    """Return how many bytes the journal takes on the disk, reserved ones too."""
    return sum(path.stat().st_blocks * 512 for path in layout.journal.glob("*.rmq"))
