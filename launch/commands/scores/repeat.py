"""`rolloutmq doctor --rewards ENV`: score the same rollouts several times, also in two processes.

The environment of a configuration rolls out with a scripted policy, whose answers and tasks come from a seed. Scores
must not depend on what the process has done before, on the order of sets (each process hashes text with its own seed),
on the clock or on unseeded chance. The scorings are one here, another here with the same object, and two in new
processes.

    same      every score and rating is the same
    DIFFERS   a score, a rater or a rollout gave other values, or raised only this time
    MISSING   a rater gave no rating in one of two scorings, or too few did to score: it failed or was late
    FAILED    the rollouts could not be scored at all
"""

import asyncio
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from rolloutmq.bus.rundir import read_run
from rolloutmq.launch.commands.doctor import Finding, print_findings
from rolloutmq.launch.preflight.hub import dataset_key, described
from rolloutmq.launch.settings import load
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, RatersMissingError
from rolloutmq.schemas.process import python_command
from rolloutmq.services.rewards.determinism import Difference, ScoredGroup, differences
from rolloutmq.services.rewards.joining import ensembles_of
from rolloutmq.services.worker.loader import load_environment
from rolloutmq.services.worker.scripted import ScriptedPolicy
from rolloutmq.services.worker.trajectory import group_of
from rolloutmq.services.worker.user_code.failures import one_line

GROUPS: Final = 8
"""Groups of a scoring, each of another task."""
MOST_SEQUENCES: Final = 8
ANSWER_CHARS: Final = 12
PATIENCE_S: Final = 300.0
"""Time for the scoring in another process: raters may ask a server."""
SHOWN: Final = 5
"""Differences shown."""
UNRATED: Final = 3
"""Exit code of a scoring in another process that lacked ratings."""


class UnratedError(Exception):
    """A scoring in another process lacked ratings."""


def report(env: str, given: Path | None, *, as_json: bool) -> int:
    """Check one environment and print the findings; return 1 if one of them is not `same`, else 0.

    Args:
        env: Name of the environment.
        given: Configuration, or run directory whose configuration to use; the defaults if None.
        as_json: Print JSON.

    Raises:
        ConfigError: There is no such environment, it cannot be loaded, or its data set cannot be fetched.
    """
    config = read_config(given)
    if env not in config.environment:
        known = ", ".join(config.environment) or "none"
        raise ConfigError(
            f"environment.{env}", f"no such section (configured: {known}); name one, with --config FILE"
        )
    if config.environment[env].command:
        raise ConfigError(
            f"environment.{env}.command", "a program scores by itself; check a class with `entry`"
        )
    return print_findings(examine(env, config), as_json=as_json)


def read_config(given: Path | None) -> RunConfig:
    """Return the configuration in a file, or that of a run directory."""
    if given is not None and given.is_dir():
        return read_run(given)[0]
    return load(given, environ=os.environ)


def examine(env: str, config: RunConfig) -> list[Finding]:
    """Return the finding for each repetition of the scoring. Blocks, also for the download of its data set.

    Raises:
        ConfigError: The environment cannot be loaded, or its data set cannot be fetched from its hub.
    """
    config, _ = described(config, keys={dataset_key(env)})
    environment = load_environment(env, config.environment[env], config.base_dir)
    what = f"rewards of {env}"
    try:
        first = scored(environment, config, env)
    except RatersMissingError as error:
        return [_unrated(what, one_line(error))]
    except Exception as error:  # noqa: BLE001 - user code may raise anything
        remedy = "repair the environment, or test it with your own script (rolloutmq.play)"
        return [Finding(what, fine=False, found=one_line(error), remedy=remedy, verdict="FAILED")]
    findings = [_finding(env, "scored twice", first, lambda: scored(environment, config, env))]
    for number in (1, 2):
        name = f"in another process ({number})"
        findings.append(_finding(env, name, first, lambda: elsewhere(env, config)))
    return findings


def scored(environment: Any, config: RunConfig, env: str) -> list[ScoredGroup]:
    """Roll out and score the same groups as every other call. Blocks; not inside an event loop."""
    for ensemble in ensembles_of(environment).values():
        ensemble.forget(env)  # scales depend on the ratings before, and should
    size = min(config.environment[env].group_size, MOST_SEQUENCES)
    return asyncio.run(_scored(environment, size, config.model.alphabet))


async def _scored(environment: Any, size: int, alphabet: str) -> list[ScoredGroup]:
    found = []
    async with AsyncExitStack() as stack:
        entered: Any = environment
        if isinstance(entered, AbstractAsyncContextManager):
            await stack.enter_async_context(entered)
        for number in range(GROUPS):
            policy = ScriptedPolicy(_answers(number, size, alphabet))
            rolled_out = await environment.rollout(policy, size, random.Random(number))
            found.append(ScoredGroup.of(group_of(f"scored/{number}", rolled_out)))
    return found


def _answers(number: int, size: int, alphabet: str) -> Sequence[str]:
    """Return answers in turn: text of many lengths, of the characters of the model."""
    rng = random.Random(f"answers {number}")
    return ["".join(rng.choices(alphabet, k=rng.randrange(ANSWER_CHARS))) for _ in range(size)]


def elsewhere(env: str, config: RunConfig) -> list[ScoredGroup]:
    """Score in a new process, with another seed of the hashes of text.

    Raises:
        UnratedError: An answer had too few ratings.
        ConfigError: It failed.
    """
    with tempfile.TemporaryDirectory(prefix="rolloutmq-rewards-") as directory:
        file, result = Path(directory) / "config.json", Path(directory) / "scored.json"
        file.write_text(config.model_dump_json())
        module = "rolloutmq.launch.commands.scores.repeat"
        command = python_command(sys.executable, module, env, str(file), str(result))
        variables = os.environ | {"PYTHONHASHSEED": str(random.SystemRandom().randrange(1, 1 << 32))}
        try:
            ended = subprocess.run(
                command, env=variables, capture_output=True, timeout=PATIENCE_S, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"environment.{env}", f"scoring took longer than {PATIENCE_S:g} s") from None
        if ended.returncode or not result.exists():
            last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
            if ended.returncode == UNRATED:
                raise UnratedError(last)
            raise ConfigError(f"environment.{env}", f"scoring failed in another process: {last}")
        return msgspec.json.decode(result.read_bytes(), type=list[ScoredGroup])


def _finding(env: str, how: str, first: Sequence[ScoredGroup], again: Any) -> Finding:
    what = f"rewards of {env}, {how}"
    differs = partial(Finding, what, fine=False, verdict="DIFFERS")
    try:
        found = list(differences(first, again()))
    except (RatersMissingError, UnratedError) as error:
        return _unrated(what, str(error))
    except Exception as error:  # noqa: BLE001 - user code may raise anything
        return differs(found=one_line(error), remedy="repair the environment: it scored before")
    sequences = sum(len(group.scores) for group in first)
    missing = [one for one in found if one.is_missing]
    # Without a rating the others make the score, and the scale of later ones: no finding about these.
    others = [one for one in found if not one.is_missing and not (missing and one.what == "score")]
    if others:
        return differs(found=_told(others, sequences), remedy=_remedy(others))
    if missing:
        return _unrated(what, _told(missing, sequences))
    text = f"{sequences} sequences in {len(first)} groups are the same"
    return Finding(what, fine=True, found=text + _never_rated(first), verdict="same")


def _unrated(what: str, found: str) -> Finding:
    remedy = "the scores could not be compared; repair these raters, or raise their timeout_s or retries"
    return Finding(what, fine=False, found=found, remedy=remedy, verdict="MISSING")


def _never_rated(scored: Sequence[ScoredGroup]) -> str:
    """Return how many ratings are missing each time, by rater: it has no opinion, or always fails."""
    counts = Counter(
        rater
        for group in scored
        for row in group.ratings
        for rater, rating in zip(group.raters, row, strict=True)
        if rating is None
    )
    told = ", ".join(f"{rater} {count} times" for rater, count in counts.items())
    return f", without a rating of {told}" if told else ""


def _told(found: Sequence[Difference], sequences: int) -> str:
    counts = ", ".join(f"{what} {count} times" for what, count in Counter(one.what for one in found).items())
    shown = "; ".join(
        f"group {one.group} sequence {one.row} {one.what}"
        + ("" if one.what == "tokens" else f": {one.values[0]!r}, then {one.values[1]!r}")
        for one in found[:SHOWN]
    )
    return f"of {sequences} sequences differ: {counts} ({shown})"


def _remedy(found: Sequence[Difference]) -> str:
    if any(one.what == "tokens" for one in found):
        return "take all randomness of the rollout from `rng`"
    raters = sorted({one.what for one in found} - {"score"})
    whose = f"the raters {', '.join(raters)}" if raters else "the score"
    return f"make {whose} depend on task and answer alone: no clock, no unseeded chance, no order of sets, no state"


def main(env: str, config: str, result: str) -> int:
    """Score for another process, and write the result to a file; return the exit code."""
    try:
        resolved = RunConfig.model_validate_json(Path(config).read_bytes())
        environment = load_environment(env, resolved.environment[env], resolved.base_dir)
        Path(result).write_bytes(msgspec.json.encode(scored(environment, resolved, env)))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
        sys.stderr.write(f"{one_line(error)}\n")
        return UNRATED if isinstance(error, RatersMissingError) else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
