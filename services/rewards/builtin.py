"""Built-in raters: `exact`, `length`, `number`, `regex`. They compute at once, without a thread.

Each takes the text of an answer (text itself, or an object with `text`, such as a `Completion`). Those that compare
take the expected value from the task: the task itself, or its item or attribute `expected`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar, Final

from rolloutmq.services.rewards.raters import Rater

_MINUS: Final = "\u2212"
"""The minus sign of typesetting, which models write too."""
_NUMBER: Final = re.compile(
    r"""
    (?:(?<![\w.)\]}])[-+])?               # a sign; after a number, as in 3-7, it is none
    (?:
        \d{1,3}(?:,\d{3})+(?!\d)           # thousands
        | \d{1,3}(?:,\d{4})+(?!\d)         # myriads
        | \d+
        | (?<![\w.])(?=\.\d)               # the point is first
    )
    (?:\.\d+)?
    (?:[eE][-+]?\d+)?
    """,
    re.VERBOSE,
)


def text_of(answer: Any) -> str:
    """Return the text of an answer. Raises TypeError if it has none."""
    text = getattr(answer, "text", answer)
    if not isinstance(text, str):
        raise TypeError(f"the answer has no text (got {type(answer).__name__})")
    return text


def part_of(task: Any, name: str | int) -> Any:
    """Return an item or attribute of a task; the task itself if the name is empty."""
    if name == "":
        return task
    if isinstance(task, Mapping) or isinstance(name, int):
        return task[name]
    return getattr(task, name)


@dataclass(frozen=True, slots=True)
class Exact:
    """1 if the text equals the expected value as text, without white space around it; else 0.

    Attributes:
        expected: Key, index or attribute of the task that has the expected value. Empty: the task.
        case: Whether capital letters differ from small ones.
    """

    expected: str | int = ""
    case: bool = True
    is_immediate: ClassVar[bool] = True

    def __call__(self, task: Any, answer: Any) -> float:
        """Compare."""
        pair = (text_of(answer).strip(), str(part_of(task, self.expected)).strip())
        one, other = pair if self.case else map(str.casefold, pair)
        return float(one == other)


@dataclass(frozen=True, slots=True)
class Regex:
    """1 if the text has a match of the pattern, else 0.

    Attributes:
        pattern: Regular expression of Python's `re`. One with nested repetitions may take exponential time, which no
            time-out of this rater can end: prefer simple ones.
        whole: Whether the whole text must match.
    """

    pattern: str
    whole: bool = False
    is_immediate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern is no regular expression: {error} (got {self.pattern!r})") from None

    def __call__(self, task: Any, answer: Any) -> float:  # noqa: ARG002 - the pattern is all
        """Search."""
        search = re.fullmatch if self.whole else re.search
        return float(search(self.pattern, text_of(answer)) is not None)


@dataclass(frozen=True, slots=True)
class Length:
    """1 for a length within the bounds, else less: 1 - excess / most, or length / least; at least 0.

    Attributes:
        most: Longest length.
        least: Shortest length.
        unit: `tokens` of a `Completion`, or `characters` of the text.
    """

    most: int
    least: int = 0
    unit: str = "tokens"
    is_immediate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or not self.most:
            raise ValueError(f"least and most must be 0 <= least <= most > 0 (got {self.least}, {self.most})")
        if self.unit not in {"tokens", "characters"}:
            raise ValueError(f"unit must be `tokens` or `characters` (got {self.unit!r})")

    def __call__(self, task: Any, answer: Any) -> float:  # noqa: ARG002 - the answer is all
        """Measure."""
        length = len(answer.token_ids if self.unit == "tokens" else text_of(answer))
        if length < self.least:
            return length / self.least
        return max(0.0, 1.0 - max(0, length - self.most) / self.most)


@dataclass(frozen=True, slots=True)
class Number:
    """Closeness of the last number in the text to the expected one: 1 within the tolerance, 0 from `far` on.

    In between it falls linearly. Without a number in the text it is 0. A number may begin with its point (`.5`), and
    have commas between groups of three or four digits (`1,234`, `12,3456`); other commas separate numbers. A minus
    after a number or a closing bracket is an operator. The expected number may be a text in the same form.

    Attributes:
        expected: Key, index or attribute of the task that has the expected number. Empty: the task.
        tolerance: Largest relative error that counts as right.
        far: Relative error from which it is 0; 0: everything beyond the tolerance.
    """

    expected: str | int = ""
    tolerance: float = 1e-6
    far: float = 0.0
    is_immediate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (
            0 <= self.tolerance < float("inf") and (self.far == 0 or self.tolerance < self.far < float("inf"))
        ):
            raise ValueError(
                f"far must be 0 or above tolerance, which must be at least 0 (got {self.far}, {self.tolerance})"
            )

    def __call__(self, task: Any, answer: Any) -> float:
        """Compare."""
        found = _NUMBER.findall(text_of(answer).replace(_MINUS, "-"))
        wanted = _value(part_of(task, self.expected))
        given = _value(found[-1]) if found else float("nan")
        if not (isfinite(given) and isfinite(wanted)):
            return 0.0
        error = abs(given - wanted) / max(abs(wanted), 1e-12) if given != wanted else 0.0
        if error <= self.tolerance:
            return 1.0
        return max(0.0, (self.far - error) / (self.far - self.tolerance)) if self.far else 0.0


def _value(number: Any) -> float:
    """Return the value of a number, or of its text. Raises ValueError if the text is none."""
    if not isinstance(number, str):
        return float(number)
    text = number.strip().replace(_MINUS, "-")
    return float(text.replace(",", "") if _NUMBER.fullmatch(text) else text)


BUILTIN: Final[Mapping[str, Callable[..., Rater]]] = {
    "exact": Exact,
    "length": Length,
    "number": Number,
    "regex": Regex,
}
"""Factories of the built-in raters by name."""
