"""Policy version as an opaque label inside vLLM."""

from rolloutmq.schemas.wire.envelope import PolicyVersion


def of(version: PolicyVersion) -> str:
    """Return the label of a version."""
    return f"{version.incarnation}.{version.step}"


def version(text: str) -> PolicyVersion | None:
    """Return the version of a label; None for a foreign one, such as the `default` of a fresh server."""
    incarnation, dot, step = text.partition(".")
    if not (dot and incarnation.isdecimal() and step.isdecimal()):
        return None
    return PolicyVersion(int(incarnation), int(step))
