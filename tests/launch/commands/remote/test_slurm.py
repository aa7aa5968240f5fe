"""The job script for Slurm, with an `srun` that starts the command on this host."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch.commands.remote.hosts import LIMIT_S, Hosts, hosts_at, wait_until

from rolloutmq.schemas.network.keys import Role
from rolloutmq.testing import assert_nothing_lost

SCRIPT = Path(__file__).parents[4] / "deploy" / "slurm" / "workers.sbatch"
SRUN = '#!/usr/bin/env bash\nwhile [[ "$1" == -* ]]; do shift; done\nexec "$@"\n'


def submit(hosts: Hosts, *words: str) -> "subprocess.Popen[str]":
    """Start the script as Slurm's batch step does: with the job's variables, and its commands in the path."""
    programs = hosts.root / "bin"
    programs.mkdir()
    program = f'#!/usr/bin/env bash\nexec {sys.executable} -P -m rolloutmq.launch.cli "$@"\n'
    for name, text in (("srun", SRUN), ("rolloutmq", program)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environ = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "HOME": str(hosts.home),
        "TMPDIR": str(hosts.home),
        "OMP_NUM_THREADS": "1",
        "SLURM_CPUS_PER_TASK": "2",
    }
    return subprocess.Popen(
        ["bash", str(SCRIPT), *words],
        env=environ,
        cwd=hosts.home,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_workers_of_a_job_join_and_end_in_order_at_sigterm(tmp_path: Path) -> None:
    with hosts_at(tmp_path) as hosts:
        hosts.broker()
        key = hosts.key("node-1", Role.WORKER)
        job = submit(hosts, "own", hosts.address, str(key), str(hosts.code))
        try:
            wait_until(lambda: job.poll() is not None or len(hosts.workers()) == 2, "two workers")
            hosts.ready(*hosts.workers())
            job.send_signal(signal.SIGTERM)
            output, _ = job.communicate(timeout=LIMIT_S)
        finally:
            job.kill()
        assert (job.returncode, hosts.workers()) == (0, {}), output
        assert_nothing_lost(hosts.layout.root)


def test_a_job_without_its_arguments_says_which(tmp_path: Path) -> None:
    command = ["bash", str(SCRIPT), "own"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert "needs four arguments (got 1); give ENVIRONMENT" in done.stderr


@pytest.mark.parametrize("option", ["signal=TERM@60", "requeue", "ntasks-per-node=1"])
def test_slurm_reads_the_options_before_the_first_command(option: str) -> None:
    head = SCRIPT.read_text().split("\nset -euo", 1)[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert option in re.findall(r"^#SBATCH --(\S+)$", head, re.MULTILINE)
