"""A short round of each side: a version arrives, clear and sealed, and so does a plain copy."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.training import stream
from benchmarks.training.stream import Plain, Streamed
from rolloutmq.bus.shm import segment_file


@pytest.mark.parametrize("sealed", [False, pytest.param(True, id="sealed")])
def test_a_version_arrives_at_every_relay(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, sealed: bool
) -> None:
    if sealed:
        pytest.importorskip("cryptography")
    monkeypatch.setattr(stream, "LAYERS", 1)
    with ExitStack() as stack:
        streamed = Streamed(run_dir, stack, 2, sealed=sealed)
        assert streamed.seconds_for_a_gb() > 0
    segment_file.sweep(kind="stage")  # the relays were killed
    assert streamed.nbytes > 4 * stream.WIDTH**2


def test_a_plain_copy_arrives_in_every_process() -> None:
    with Plain(1 << 20, 2) as plain:
        assert plain.seconds_for_a_gb() > 0
