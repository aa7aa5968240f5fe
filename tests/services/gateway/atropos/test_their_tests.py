"""Atropos' own tests of its server, unmodified, against the gateway.

They ask whoever listens at localhost:8000. They start a server of their own there, which finds the port taken and ends;
that it was the gateway which answered is seen by what only the gateway counts.
"""

import re
import socket
import subprocess
from pathlib import Path
from typing import Final

import pytest
from tests.services.gateway.atropos.servers import LIMIT_S, PYTHON, Api, our_server

from benchmarks.queues import atropos

PORT: Final = 8000
FILES: Final = ("test_api_compression.py", "test_api_legacy.py", "test_api_messages_handling.py")
HOST: Final = "127.0.0.1"
REFUSED: Final = {
    "test_sft_batch_processing",
    "test_messages_with_numeric_strings_as_content",
}
"""Those of theirs that fail, on purpose: they post four advantages for three tokens, which the gateway refuses."""


def taken() -> bool:
    """Whether somebody else has their port."""
    try:
        socket.create_server((HOST, PORT)).close()
    except OSError:
        return True
    return False


def posted(api: Api) -> float:
    """Return how many groups the gateway has taken."""
    found = re.search(r"^rolloutmq_gateway_groups_total (\S+)$", api.get("/metrics").body.decode(), re.M)
    assert found is not None
    return float(found[1])


@pytest.mark.rival
@pytest.mark.skipif(bool(atropos.missing()), reason=atropos.missing())
@pytest.mark.parametrize("file", FILES)
def test_their_tests_pass(file: str, tmp_path: Path) -> None:
    if taken():
        pytest.skip(f"their tests ask at port {PORT}, which somebody else has")
    [tests] = (PYTHON.parents[1] / "lib").glob("python3*/site-packages/atroposlib/tests")
    with our_server(tmp_path / "run", "--port", str(PORT)) as (url, _):
        api = Api("ours", url)
        before = posted(api)
        plain = tmp_path / "pytest.ini"
        plain.write_text("[pytest]\n")
        told = subprocess.run(
            [
                str(PYTHON),
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "-c",
                str(plain),
                str(tests / file),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=5 * LIMIT_S,
            check=False,
        )
        failed = set(re.findall(r"^(?:FAILED|ERROR) .*?::(\w+)(?: - |$)", told.stdout, re.M))
        of_file = {name for name in REFUSED if f"def {name}(" in (tests / file).read_text()}
        assert failed == of_file, told.stdout[-5000:]
        assert told.returncode == bool(of_file)
        assert posted(api) > before
