import os
import subprocess
import sys

import pytest

from benchmarks.harness import cpu, stage


def test_the_cpu_of_another_process_is_what_it_says_of_itself() -> None:
    script = (
        "import time\n"
        "while time.process_time() < 0.2: pass\n"
        "print(time.process_time(), flush=True); input(); print(time.process_time(), flush=True); input()"
    )
    pipe = subprocess.PIPE
    with stage.ended(
        subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True)
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        before = float(process.stdout.readline())
        seen = cpu.spent_s(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        after = float(process.stdout.readline())
        assert before <= seen <= after


def test_a_process_that_there_is_not_is_an_error() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(OSError, match="Invalid argument"):
        cpu.spent_s(child)
