"""An installed RolloutMQ, tried in the working directory: `PYTHON smoke.py VERSION`, with pytest beside it.

Uses the standard library and the package that PYTHON has installed, nothing of a checkout. With torch it trains two
steps; without torch every command that needs it must name the extra. Ends with a line `smoke: ok`.
"""

import importlib.util
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import rolloutmq
from rolloutmq import Consumer, Group, Producer

COMMAND = str(Path(sys.executable).with_name("rolloutmq"))
PATIENCE_S = 300.0
REMEDY = "the package torch is missing: run pip install 'rolloutmq[trainer]'"
GROUPS = 4
RUN = "runs/mine"


def told(*words: str, code: int = 0, cwd: str = ".") -> str:
    """Run a program; check its exit code and that it shows no traceback; return what it printed."""
    done = subprocess.run(
        words,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    text = done.stdout + done.stderr
    assert done.returncode == code, f"{words}: exit code {done.returncode}, not {code}\n{text}"
    assert "Traceback" not in text, text
    return text


def try_version(expected: str) -> None:
    assert Path(rolloutmq.__file__).is_relative_to(sys.prefix), rolloutmq.__file__
    assert version("rolloutmq") == rolloutmq.__version__ == expected
    assert told(COMMAND, "--version") == f"rolloutmq {expected}\n"
    assert "Message bus for LLM reinforcement learning" in told(COMMAND, "--help")
    told(COMMAND, "doctor")


def try_round_trip() -> None:
    """Send groups through a broker, train on all of them, and let the ledger account for them."""
    with subprocess.Popen([COMMAND, "broker", "--run-dir", RUN]) as broker:
        try:
            send_and_train()
        finally:
            broker.terminate()
            code = broker.wait(PATIENCE_S)
    assert code == 0, code
    assert f"{GROUPS} " in told(COMMAND, "ledger", "verify", RUN)


def send_and_train() -> None:
    with Producer.blocking(RUN, env="mine", producer="mine-0", group_size=2) as producer:
        for number in range(GROUPS):
            group = Group.build(
                f"group-{number}",
                tokens=[[1, 2, 3], [1, 2, 4, 5]],
                mask=[[0, 0, 1], [0, 0, 1, 1]],
                scores=[0.0, 1.0],
                inference_logprobs=[[0.0, 0.0, -0.7], [0.0, 0.0, -0.2, -0.1]],
            )
            producer.send(group)
    seen = []
    with Consumer.blocking(RUN, sequences=GROUPS) as consumer:
        for batch in consumer:
            seen += [group.group_id for group in batch.groups]
            batch.ack()
            if len(seen) >= GROUPS:
                break
    assert sorted(seen) == [f"group-{number}" for number in range(GROUPS)], seen


def try_project(*, torch: bool) -> None:
    """Write an environment, test it, check its configuration, and train on it or read why not."""
    told(COMMAND, "init", "my-env")
    assert "3 passed" in told(sys.executable, "-m", "pytest", "-q", cwd="my-env")
    if torch:
        told(COMMAND, "check", "config.toml", cwd="my-env")
        told(COMMAND, "up", "config.toml", "--plain", "--set", "trainer.steps=2", cwd="my-env")
        return
    checked = told(COMMAND, "check", "config.toml", cwd="my-env", code=1)
    assert REMEDY in checked, checked
    assert "environment my-env: 8 tasks drawn" in checked, checked
    for words in (("up", "config.toml"), ("try", "config.toml")):
        assert REMEDY in told(COMMAND, *words, cwd="my-env", code=1)


def try_names_without_torch() -> None:
    """Start the processes that need torch, in the run that the broker has left, and take the names that need it."""
    for process in ("trainer", "inference"):
        assert REMEDY in told(COMMAND, process, "--run-dir", RUN, code=1)
    for name in ("run_policy", "share_weights"):
        assert REMEDY in refusal_of(name)


def refusal_of(name: str) -> str:
    """Return why a public name cannot be had; empty if it can."""
    try:
        getattr(rolloutmq, name)
    except rolloutmq.MissingError as error:
        return str(error)
    return ""


def main(expected: str) -> None:
    torch = importlib.util.find_spec("torch") is not None
    try_version(expected)
    try_project(torch=torch)
    try_round_trip()
    if not torch:
        try_names_without_torch()
    print("smoke: ok, with torch" if torch else "smoke: ok")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
