"""Environments with every mistake that a preflight check finds, and configurations of them."""

from pathlib import Path
from typing import Any, Final

from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig

CLASSES: Final = """
import asyncio
import ctypes
import os
import signal

from rolloutmq import Ensemble, SingleTurn, Trajectory


class Good(SingleTurn):
    def task(self, rng):
        return rng.randrange(50), rng.randrange(50)

    def prompt(self, task):
        return f"{task[0]}={task[1]}"

    def score(self, task, completion):
        return 0.0


class Unscored(SingleTurn):
    task, prompt = Good.task, Good.prompt


class Weightless(Unscored):
    def __init__(self, **options):
        self.rewards = Ensemble({"a": "exact"}, **options)


class Own(Unscored):
    rewards = Ensemble({"a": "exact", "b": "number"})


class Plus(Good):
    def prompt(self, task):
        return f"<bos>{task[0]}+{task[1]}="


class Chat(Good):
    def prompt(self, task):
        return [{"role": "user", "content": [{"type": "text", "text": "1+1"}]}]


class Ids(Good):
    def prompt(self, task):
        return [1, 2, 3]


class Turns(Plus):
    async def rollout(self, policy, size, rng):
        return [Trajectory.of(one, 1.0) for one in await policy.complete("1=", n=size)]


class Retold(Plus):
    async def member(self, policy, task, rng):
        (one,) = await policy.complete("1=", max_tokens=3)
        return one, (await policy.complete(f"1={one.text}2=", max_tokens=3))[0]

    async def rollout(self, policy, size, rng):
        turns = [await self.member(policy, None, rng) for _ in range(size)]
        return [Trajectory.of(one).then(two).scored(0.0) for one, two in turns]


class Continued(Retold):
    async def member(self, policy, task, rng):
        (one,) = await policy.complete("1=", max_tokens=3)
        return one, (await policy.complete("2=", after=Trajectory.of(one), max_tokens=3))[0]


class Rows(Good):
    ROWS = [("1", "1"), ("2", "2"), ("3", "3")]

    def task_at(self, index, rng):
        return self.ROWS[index]


class HeldOut(Rows):
    def eval_task_at(self, index, rng):
        return self.ROWS[index % 2]


class Looked:
    async def rollout(self, policy, size, rng):
        return []

    async def rollout_at(self, policy, index, size, rng):
        return []


class Promptless(Good):
    def prompt(self, task):
        return None


class Unlucky(Good):
    def task(self, rng):
        raise KeyError("no such dataset")


class Managed(Unlucky):
    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass


class Leaving(Good):
    def __init__(self):
        os._exit(7)


class Hanging(Good):
    def __init__(self):
        while True:
            pass


class Broken(Good):
    def __init__(self):
        raise ValueError("no key")


class Brokenly(Broken):
    rollout = None


class Raises(Good):
    def score(self, task, completion):
        return 1 / (len(task) - 2)


class Third(Good):
    scored = 0

    def score(self, task, completion):
        self.scored += 1
        if self.scored == 5:
            raise KeyError("third")
        return 0.0


class PromptNumber(Good):
    def prompt(self, task):
        return 42


class PromptBytes(Good):
    def prompt(self, task):
        return b"1="


class PromptEmpty(Good):
    def prompt(self, task):
        return []


class PromptMessage(Good):
    def prompt(self, task):
        return {"role": "user", "content": "1="}


class PromptAsync(Good):
    async def prompt(self, task):
        return "1="


class TaskAsync(Good):
    async def task(self, rng):
        return 1, 2


class PromptRaises(Good):
    def prompt(self, task):
        return task[2]


class Endless(Good):
    max_tokens = 0


class Spelled(Good):
    max_tokens = "4"


class Cold(Good):
    temperature = -1


class Numbered(Good):
    stop = 5


class Unstopped(Good):
    stop = ""


class Recursive(Good):
    def score(self, task, completion):
        return self.score(task, completion)


class Surrogate(Good):
    def score(self, task, completion):
        raise ValueError("bad \\udcff")


class Written(Good):
    def score(self, task, completion):
        return "0.5"


class Wide(Good):
    def prompt(self, task):
        return "1" * 5000


class Wordy(Good):
    max_tokens = 999


class Twice(Good):
    async def rollout(self, policy, size, rng):
        (first,) = await policy.complete("1" * 61, max_tokens=1)
        turns = Trajectory.of(first)
        (second,) = await policy.complete([3], after=turns, max_tokens=70)
        return [turns.then(second).scored(1.0)] * size


class Growing(Good):
    asked = 0

    async def rollout(self, policy, size, rng):
        self.asked += 1
        return [Trajectory.of(one, 1.0) for one in await policy.complete("1" * 60 * self.asked, n=size)]


class WideChat(Good):
    def prompt(self, task):
        return [{"role": "user", "content": "1" * 300}]


class LongChat(Good):
    async def rollout(self, policy, size, rng):
        (first,) = await policy.complete("1" * 61, max_tokens=1)
        turns = Trajectory.of(first)
        (second,) = await policy.chat([{"role": "tool", "content": "1"}], after=turns, max_tokens=70)
        return [turns.then(second).scored(1.0)] * size


class Message(Good):
    def __init__(self, **message):
        self.message = {"role": "user", **message}

    def prompt(self, task):
        return [self.message]


class SecondTurn(Good):
    async def rollout(self, policy, size, rng):
        (first,) = await policy.complete("1=", max_tokens=2)
        turns = Trajectory.of(first)
        return [turns.then(await self.asked(policy, first, turns)).scored(1.0)] * size


class TextAsMessages(SecondTurn):
    async def asked(self, policy, first, turns):
        return (await policy.chat("1=", after=turns, max_tokens=2))[0]


class AnswerAgain(SecondTurn):
    async def asked(self, policy, first, turns):
        said = [{"role": "assistant", "content": "1"}, {"role": "user", "content": "1="}]
        return (await policy.chat(said, after=turns, max_tokens=2))[0]


class TurnsAgain(SecondTurn):
    async def asked(self, policy, first, turns):
        ids = await policy.render([{"role": "user", "content": "1="}], after=turns)
        return (await policy.complete(ids, after=turns, max_tokens=2))[0]


class AfterCompletion(SecondTurn):
    async def asked(self, policy, first, turns):
        return (await policy.complete("1=", after=first, max_tokens=2))[0]


class Greedy(Good):
    temperature = 0


def keyless(task, answer):
    raise ValueError("no key")


def infinite(task, answer):
    return float("nan")


def worded(task, answer):
    return "good"


def silent(task, answer):
    return None


def halved(task, answer):
    return 0.5


async def late(task, answer):
    await asyncio.Event().wait()


def unreachable(task, answer):
    raise ConnectionError("no judge")


class Paired(Unscored):
    def __init__(self, kind):
        self.rewards = Ensemble({"a": halved, "b": {"rater": globals()[kind], "timeout_s": 0.05}})


class Unratable(Unscored):
    rewards = Ensemble({"a": keyless, "b": infinite})


class Unreachable(Unscored):
    rewards = Ensemble({"a": unreachable, "b": infinite})


class Opinionless(Unscored):
    rewards = Ensemble({"a": silent})


class ScoreExits(Good):
    async def score(self, task, completion):
        await asyncio.sleep(0)
        os._exit(0)


class PromptKills(Good):
    def prompt(self, task):
        os.kill(os.getpid(), signal.SIGKILL)


class RolloutFaults(Good):
    async def rollout(self, policy, size, rng):
        self.prompt(self.task(rng))
        os.kill(os.getpid(), signal.SIGSEGV)


def faulty(task, answer):
    ctypes.string_at(0)


class RaterFaults(Unscored):
    rewards = Ensemble({"a": faulty})


class RaterExits(Unscored):
    rewards = Ensemble({"a": lambda task, answer: os._exit(3)})


class Slow(Good):
    scored = 0

    async def score(self, task, completion):
        self.scored += 1
        if self.scored > 5:
            await asyncio.Event().wait()
        return 0.0


class Unnumbered(Good):
    def score(self, task, completion):
        return None if len(completion.text) < 99 else 1.0


class Misnamed(Good):
    def score(self, task, completion):
        return float(completion.txet == "1")


class Unnamed(Good):
    def score(self, task, completion):
        return float(completion.text == answr)


class Synchronous(Good):
    def rollout(self, policy, size, rng):
        return []


class Client(Good):
    async def rollout(self, policy, size, rng):
        async with policy.endpoint():
            return []


class Debugged(Good):
    def score(self, task, completion):
        breakpoint()
        return 0.0


class Printing(Good):
    def score(self, task, completion):
        print("scored")
        return 0.0


class Spinning(Good):
    def score(self, task, completion):
        while True:
            pass


class Waiting(Good):
    async def score(self, task, completion):
        await asyncio.Event().wait()


class Retokenized(Good):
    async def rollout(self, policy, size, rng):
        (first,) = await policy.complete("1=", max_tokens=30)
        (second,) = await policy.complete(f"1={first.text}=", max_tokens=3)
        return [Trajectory.of(first).then(second).scored(0.0)] * size


class OverlapExits(Good):
    exits_after = 9  # of two scores that overlap, the one that began first has ended

    async def score(self, turns):
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns == self.exits_after:
            os._exit(5)

    async def rollout(self, policy, size, rng):
        await asyncio.gather(self.score(1), self.score(9))
        os._exit(5)  # unless a score did


class ScoredExits(OverlapExits):
    exits_after = 0  # both have ended


class Unentered(Good):
    async def __aenter__(self):
        raise OSError("no sandbox")

    async def __aexit__(self, *_):
        pass
"""


def config(
    base_dir: Path, kind: str, environment: dict[str, Any] | None = None, **sections: Any
) -> RunConfig:
    """Return the configuration of a run with the environment `e` of that class."""
    entry = kind if ":" in kind else f"tried.py:{kind}"
    about = {"e": {"entry": entry, **(environment or {})}}
    return validate({"environment": about, "base_dir": str(base_dir), **sections})
