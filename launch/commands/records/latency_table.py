"""Table of latencies: percentiles and rates of each row, as text and as plain data. Pure.

A duration below the error between the clocks of two hosts is not known: it is shown as `< ERROR`.
"""

from collections.abc import Iterator
from typing import Any, Final

from rolloutmq.schemas.statistics.histogram import Histogram
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.monitor.profile.latencies import By, Sum, SumKey, Sums

PERCENTS: Final = (50.0, 95.0, 99.0, 99.9)
RATE_HEADS: Final = f"{'per s':>9}{'tokens/s':>10}"
NO_ANSWER: Final = "none"
"""Status of a call without an answer, and of a request whose client left."""


def sums_json(sums: Sums, by: By) -> dict[str, Any]:
    """Return the sums as plain data; all times in seconds."""
    return {
        "by": by.value,
        "dropped_rows": sums.dropped,
        "rows": [
            {
                by.value: key.label,
                "hop": key.hop.value,
                "split": key.split.name.lower(),
                "status": key.status,
                "count": one.durations.count,
                "mean_s": one.durations.mean_s,
                **{f"p{percent:g}_s": one.percentile_s(percent) for percent in PERCENTS},
                "slowest_s": one.slowest_s,
                "slowest": one.slowest_id,
                "per_s": one.per_s,
                "tokens": one.tokens,
                "tokens_per_s": one.tokens_per_s,
                "seconds": one.seconds,
                "clock_error_s": one.clock_error_s,
            }
            for key, one in sums.rows.items()
        ],
    }


def sums_lines(sums: Sums, by: By) -> Iterator[str]:
    """Yield the sums as a table."""
    width = max(len(by.value), *(len(_label(key)) for key in sums.rows))
    yield f"{by.value:<{width}}  {'hop':<13}{'count':>9}{'mean':>9}{percent_heads()}{RATE_HEADS}  slowest"
    for key, one in sums.rows.items():
        times = durations_of(one.durations, one.clock_error_s, one.slowest_s) + rates_of(one)
        row = f"{_label(key):<{width}}  {_hop(key):<13}{one.durations.count:>9,}{times}"
        yield f"{row}  {seconds(one.slowest_s)} {one.slowest_id}".rstrip()
    if sums.dropped:
        yield f"{sums.dropped:,} rows of one sample had no row of their own, and count as others"


def percent_heads() -> str:
    """Return the heads of the percentiles."""
    return "".join(f"{f'p{percent:g}':>9}" for percent in PERCENTS)


def durations_of(one: Histogram, clock_error_s: float, slowest_s: float) -> str:
    """Return the mean and the percentiles of a row, each nine characters or more; `slowest_s` is 0 if not known."""
    values = (one.mean_s, *(one.percentile_s(percent, slowest_s) for percent in PERCENTS))
    return "".join(f" {_known(value, clock_error_s):>8}" for value in values)


def rates_of(one: Sum) -> str:
    """Return durations and tokens a second."""
    tokens = f"{one.tokens_per_s:,.0f}" if one.tokens else "-"
    return f"{one.per_s:>9,.2f}{tokens:>10}"


def _label(key: SumKey) -> str:
    return f"{key.label} (eval)" if key.split is Split.EVAL else key.label


def _hop(key: SumKey) -> str:
    """Return the hop, with the class of the status where there may be one."""
    return f"{key.hop.value} {key.status or NO_ANSWER}" if key.hop.has_status else key.hop.value


def _known(value: float, clock_error_s: float) -> str:
    return f"< {seconds(clock_error_s)}" if value < clock_error_s else seconds(value)


def seconds(value: float) -> str:
    """Return a duration with three digits, in the unit that fits: `1.34 s`, `52.3 ms`, `840 us`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size or unit == "us":
            scaled = value / size
            digits = 0 if scaled >= 100 else 1 if scaled >= 10 else 2
            return f"{scaled:.{digits}f} {unit}"
    raise AssertionError
