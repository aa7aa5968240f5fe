"""The bias report as text: a table for each environment, and a verdict for each figure. Pure."""

from collections.abc import Iterator, Mapping
from typing import Final

from rolloutmq.services.monitor.report.bias import (
    DIMENSIONS,
    FILTERED,
    OPEN,
    TRAINED,
    Bias,
    BiasVerdict,
    Bin,
    Comparison,
    Dimension,
    EnvironmentBias,
    Side,
)

LABEL: Final = 12
"""Width of the labels, in characters."""
SHOWN: Final = 16
"""Most environments with a table: those with a bias first, then those with the most groups."""
HEADS: Final = ("groups", "sequences", "tokens/seq", "duration s", "reward")
SAYS: Final[Mapping[BiasVerdict, str]] = {
    BiasVerdict.NONE_SHOWS: "no bias found",
    BiasVerdict.TOO_FEW: "too few groups, or too few left out, for a verdict",
    BiasVerdict.ONE_PART: "nothing to compare, all alike",
}


def verdict_line(bias: Bias) -> str:
    """Return the biased figures as one line. The filter's intended bias is reported only if there is no other."""
    found: list[str] = []
    meant: list[str] = []
    for env, one in bias.environments.items():
        for name, dimension in one.dimensions.items():
            if dimension.biased:
                lines = found if set(dimension.biased) - {TRAINED, FILTERED} else meant
                lines.append(f"{env} by {name} ({', '.join(dimension.biased)})")
    if bias.across.verdict is BiasVerdict.BIASED:
        found.append("between environments")
    if found:
        more = f"; and {len(found) - SHOWN:,} more" if len(found) > SHOWN else ""
        return "shows: " + "; ".join(found[:SHOWN]) + more
    if meant:
        return "only by the filter, which removes groups without a learning signal: " + "; ".join(meant)
    verdicts = {one.verdict for env in bias.environments.values() for one in env.dimensions.values()}
    return SAYS[BiasVerdict.NONE_SHOWS if BiasVerdict.NONE_SHOWS in verdicts else BiasVerdict.TOO_FEW]


def table(bias: Bias) -> Iterator[str]:
    """Yield the lines of the table, and of the groups it cannot compare; of many environments, only some have one."""
    shown = sorted(bias.environments, key=lambda name: _turn(bias.environments[name]))[:SHOWN]
    for name, env in bias.environments.items():
        if name in shown:
            yield from _environment(name, env)
            yield ""
    if rest := len(bias.environments) - len(shown):
        yield f"and {rest:,} more environments; the biased ones come first, `--json` has all"
    if len(bias.environments) > 1:
        yield f"between environments: {_says(bias.across)}"
    yield from _unknown(bias)


def _turn(env: EnvironmentBias) -> tuple[bool, int]:
    """Order environments: the biased ones, the filter's bias included, then by their groups."""
    is_biased = any(dimension.biased for dimension in env.dimensions.values())
    return not is_biased, -env.produced.groups


def _environment(name: str, env: EnvironmentBias) -> Iterator[str]:
    yield f"{name}: " + ", ".join(f"{count:,} {fate.replace('_', ' ')}" for fate, count in env.fates.items())
    yield " " * (LABEL + 2) + "".join(f"{head:>12}" for head in HEADS)
    yield _side("produced", env.produced)
    yield _side("trained", env.trained)
    for dimension in DIMENSIONS:
        yield from _dimension(dimension, env.dimensions[dimension])


def _side(label: str, side: Side) -> str:
    means = (_figure(getattr(side, name)) for name in DIMENSIONS)
    cells = (f"{side.groups:,}", f"{side.sequences:,}", *means)
    return f"  {label:<{LABEL}}" + "".join(f"{cell:>12}" for cell in cells)


def _dimension(name: str, found: Dimension) -> Iterator[str]:
    ratio = f", x{found.ratio:.2f} from the lowest part to the highest" if found.ratio is not None else ""
    unknown = f"; unknown for {found.unknown:,} groups" if found.unknown else ""
    yield f"  {name:<{LABEL}}trained: {_says(found.trained)}{ratio}{unknown}"
    for reason, comparison in found.reasons.items():
        yield f"  {'':<{LABEL}}{reason}: {_says(comparison)}"
    if len(found.bins) > 1:
        yield from map(_bin, found.bins)


def _bin(one: Bin) -> str:
    span = _figure(one.low) + (f" to {_figure(one.high)}" if one.low < one.high else "")
    shares = [f"trained {_share(one.trained)}"]
    shares += [f"{reason} {_share(share)}" for reason, share in one.dropped.items()]
    return f"  {'':<{LABEL}}  {span:<22}{one.produced:>9,} groups   {'  '.join(shares)}"


def _says(found: Comparison) -> str:
    if found.verdict is not BiasVerdict.BIASED:
        return SAYS[found.verdict]
    chance = f"p = {found.p:.1g}" if found.p else "p < 1e-300"
    return f"BIASED ({chance}, h = {found.h:.2f})"


def _unknown(bias: Bias) -> Iterator[str]:
    open_groups = sum(env.fates.get(fate, 0) for env in bias.environments.values() for fate in OPEN)
    if open_groups:
        yield f"not in the shares: {open_groups:,} groups without an outcome yet"
    if bias.evaluation:
        yield f"left out: {bias.evaluation:,} evaluation groups"
    if bias.undescribed:
        fates = ", ".join(f"{count:,} {fate.replace('_', ' ')}" for fate, count in bias.undescribed.items())
        yield f"left out: groups with a known id only ({fates}): neither an ack log nor the journal describes them"
    yield (
        "not recorded: rollouts that the broker never accepted (raised, timed out, lost with their worker)"
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
