"""`/docs`: the endpoints with their schemas, and a form that sends requests. Pure.

The page is one file without external resources, so that it also works without a network. Its script reads
`/openapi.json` from the same gateway.
"""

from functools import cache
from importlib.resources import files
from typing import Final

PACKAGE: Final = "rolloutmq.services.gateway.pages"
PAGE: Final = "docs.html"
POLICY: Final = (
    b"default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    b"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy: a browser loads nothing from elsewhere, and sends nothing there."""


@cache
def docs() -> bytes:
    """Return the page."""
    return files(PACKAGE).joinpath(PAGE).read_bytes()
