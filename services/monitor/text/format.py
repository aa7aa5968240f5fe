"""Number formats: bytes, durations, ledger counts, bars and sparklines. Plain text without colour."""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from rolloutmq.schemas.wire.control import LedgerCounts

SPARKS: Final = "▁▂▃▄▅▆▇█"
UNITS: Final = {unit: 1024**power for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))}
TIMES: Final = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
EIGHTHS: Final = " ▏▎▍▌▋▊▉█"


def amount(nbytes: float) -> str:
    """Return bytes in the largest binary unit with a value of at least 1: `1.4 GiB`."""
    value = float(nbytes)
    unit = next((unit for unit, size in UNITS.items() if value < size * 1024), "TiB")
    value /= UNITS[unit]
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def portion(used: float, total: float) -> str:
    """Return bytes of a total, in the unit of the total: `6.2/256 MiB`."""
    whole = amount(total)
    value = used / UNITS[whole.split()[1]]
    return f"{value:.0f}/{whole}" if value >= 100 else f"{value:.1f}/{whole}"


def clock(seconds: float) -> str:
    """Return a duration as `m:ss` or `h:mm:ss`."""
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def seconds(value: float) -> str:
    """Return a duration with three digits, in the unit that fits: `1.34 s`, `52.3 ms`, `840 us`."""
    unit, size = _unit_of(value)
    return f"{_digits(value / size)} {unit}"


def seconds_pair(low: float, high: float) -> str:
    """Return two durations in the unit of the second: `95.4/914 ms`."""
    unit, size = _unit_of(high)
    return f"{_digits(low / size)}/{_digits(high / size)} {unit}"


def _unit_of(value: float) -> tuple[str, float]:
    return next((pair for pair in TIMES if value >= pair[1]), TIMES[-1])


def _digits(scaled: float) -> str:
    return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f}"


def time_of_day(wall: float) -> str:
    """Return a time as `hh:mm:ss`, local."""
    return time.strftime("%H:%M:%S", time.localtime(wall))


def bar(fraction: float, width: int) -> str:
    """Return a bar of `width` cells, filled to an eighth of a cell."""
    eighths = round(min(max(fraction, 0.0), 1.0) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[part] if part else "")).ljust(width)


def sparkline(values: Sequence[float], width: int, low: float, high: float) -> str:
    """Return `values` in at most `width` cells; each cell is the mean of its part."""
    if not values or width < 1:
        return ""
    cells = min(width, len(values))
    edges = [index * len(values) // cells for index in range(cells + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    span = high - low
    top = len(SPARKS) - 1
    return "".join(
        SPARKS[min(top, max(0, round((mean - low) / span * top)))] if span > 0 else SPARKS[0]
        for mean in means
    )


def accounts(ledger: LedgerCounts, *, short: bool = False) -> str:
    """Return the ledger as text; empty states are left out.

    Args:
        ledger: The broker's counts.
        short: Count committed groups as trained.
    """
    places = {
        "queued": ledger.queued,
        "leased": ledger.leased,
        "trained": ledger.trained + (ledger.committed if short else 0),
        "committed": 0 if short else ledger.committed,
        "filtered": ledger.filtered,
        "expired": ledger.expired,
        "dead": ledger.dead,
        "discarded": ledger.discarded,
    }
    held = (f"{place} {count}" for place, count in places.items() if count)
    return f"accepted {ledger.accepted} = " + (" + ".join(held) or "0")


def insecure(address: str) -> str:
    """Return what an address without keys means, and what to do."""
    return f"whoever reaches {address} may use the run, unencrypted; set broker.keys (`rolloutmq keys init`)"


def unencrypted(servers: Sequence[str]) -> str:
    """Return what HTTP servers without TLS mean, and what to do."""
    where = ", ".join(servers)
    return f"tokens travel unencrypted to {where}; set run.tls_cert and run.tls_key (`rolloutmq keys tls`)"
