from pathlib import Path

from benchmarks.broker import start
from rolloutmq.bus.encoding.codec import encode_group
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import GROUP_LIMIT_BYTES


def test_a_broker_on_a_written_journal_has_a_whole_batch_at_once(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    start.write_journal(layout, encode_group(start.group(), GROUP_LIMIT_BYTES), start.BATCH_GROUPS)
    assert 0 < start.first_batch_s(layout) < start.DEADLINE_S
    assert start.read_s(layout) > 0


def test_a_broker_on_nothing_replies() -> None:
    assert 0 < start.ready_s() < start.DEADLINE_S


def test_the_import_is_measured_in_other_processes() -> None:
    assert start.import_s(start.SDK) > start.import_s("pass") > 0
