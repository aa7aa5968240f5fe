"""TransferQueue once verl has closed it: nothing starts another one."""

import subprocess

import pytest
from tests.trainer.integrations.verl.support import ENDED_WITHIN_S, PYTHON, environment, missing

pytestmark = [pytest.mark.rival, pytest.mark.skipif(bool(missing()), reason=missing())]

LATE = """
import ray
from rolloutmq.schemas.errors import ClosedError
from rolloutmq.trainer.integrations.verl.store import TransferQueueStore
try:
    TransferQueueStore().put("train", ["u"], [{"status": "running"}])
except ClosedError as error:
    print(error, ray.is_initialized())
"""


def test_a_put_after_the_end_is_refused_and_starts_no_ray() -> None:
    ended = subprocess.run(
        [str(PYTHON), "-c", LATE],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=ENDED_WITHIN_S,
        check=False,
    )
    assert ended.stdout.endswith("TransferQueue: closed by verl; its training has ended False\n"), (
        ended.stderr[-6000:]
    )
