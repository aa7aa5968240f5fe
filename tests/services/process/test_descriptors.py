import subprocess
import sys
from typing import Final

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
