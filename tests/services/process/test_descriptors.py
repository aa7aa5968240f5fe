import asyncio
import os
import subprocess
import sys
from typing import Final

from rolloutmq.services.process.descriptors import readable

PROGRAM: Final = """
import resource
from rolloutmq.services.process.descriptors import raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
raise_descriptor_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
raise_descriptor_limit(8)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
raise_descriptor_limit(1000)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_limit_rises_to_the_hard_one_less_the_reserve() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["(512, 512)", "(504, 512)", "(448, 512)"]


async def test_a_descriptor_is_readable_with_data_and_once_its_peer_has_gone() -> None:
    reading, writing = os.pipe()
    waiting = asyncio.create_task(readable(reading), name="readable")
    await asyncio.sleep(0)
    assert not waiting.done()
    os.write(writing, b"x")
    async with asyncio.timeout(60):
        await waiting
        os.read(reading, 1)
        os.close(writing)
        await readable(reading)
    os.close(reading)
