"""Raters that gave no rating in the rollouts of a trial or of `try`: the others make the score, and hide it."""

from collections.abc import Iterator
from typing import Any

from rolloutmq.bus.lifecycle import without_secrets
from rolloutmq.launch.preflight.verdicts import Problem
from rolloutmq.services.rewards.calls import RaterFaultError
from rolloutmq.services.rewards.joining import ensembles_of
from rolloutmq.services.worker.user_code.failures import UserFiles, failure_of


def silent_raters(name: str, environment: Any, files: UserFiles) -> Iterator[Problem]:
    """Yield each rater of an environment that was asked, failed each time, and why.

    A rater that has no opinion of any answer is left out: a script's answers may deserve none.

    Args:
        name: Name of the environment.
        environment: Its instance, after its rollouts.
        files: Tell the user's frames.
    """
    for ensemble in ensembles_of(environment).values():
        faults = ensemble.faults()
        for rater, cost in ensemble.costs().items():
            if cost.rated or rater not in faults:
                continue
            fault = faults[rater]
            why = without_secrets(str(fault)) if isinstance(fault, RaterFaultError) else ""
            failure = failure_of(fault, files, why)
            yield Problem(
                path=f"environment.{name}",
                problem=f"rater {rater} rated none of {cost.missing} answers: {failure.headline}; only other raters "
                "make the score",
                report=failure.report if failure.where else "",
            )
