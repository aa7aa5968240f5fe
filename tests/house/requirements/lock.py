"""Hashes of pinned packages: `python tests/house/requirements/lock.py FILE...` rewrites requirement files in place.

A file has a line `name==version` for each package, and lines below it with the hashes of its wheels for every supported
Python and machine, so that pip installs no other file of that version. To change a version, edit its line and run this
again. It asks the index that pip uses for each package, and downloads none. A package whose wheels all want a newer C
library has those: a source distribution would want a compiler, and often one that a newcomer lacks. A package without
wheels has its source distribution.
"""

import json
import os
import re
import sys
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version
from pip._internal.models.index import PyPI

PYTHONS: Final = ("3.11", "3.12", "3.13")
MACHINES: Final = ("x86_64", "aarch64")
GLIBC_MINORS: Final = range(28, 4, -1)
"""Not newer than that of torch's wheels: an older library cannot load them anyway."""
NEWER_GLIBC_MINORS: Final = range(35, 28, -1)
"""For a package that has no older wheel. Ubuntu 22.04 has 2.35, Debian 12 has 2.36."""
PIN: Final = re.compile(r"^([A-Za-z0-9._-]+(?:\[[\w,]+\])?==[^\s;\\]+)(\s*;[^\\]+?)?\s*\\?$", re.MULTILINE)
PATIENCE_S: Final = 60.0
_JSON: Final = "application/vnd.pypi.simple.v1+json"
_INDENT: Final = " \\\n    "


def pins_of(text: str) -> list[str]:
    """Return the pins of a requirement file, each with its marker."""
    return [f"{pin}{(marker or '').rstrip()}" for pin, marker in PIN.findall(text)]


def header_of(text: str) -> str:
    """Return the comment with which a file begins."""
    return "".join(f"{line}\n" for line in text.splitlines() if line.startswith("#"))


def name_of(pin: str) -> str:
    """Return the name of a package in the form in which it compares."""
    return canonicalize_name(re.split(r"[\[=;]", pin, maxsplit=1)[0])


def version_of(pin: str) -> Version:
    """Return the pinned version."""
    return Version(pin.partition("==")[2].partition(";")[0].strip())


def supported(glibc_minors: Iterable[int] = GLIBC_MINORS) -> frozenset[Tag]:
    """Return the tags of all wheels that a supported Python installs on a supported machine with such a C library."""
    tags: set[Tag] = set()
    for python in PYTHONS:
        major, minor = map(int, python.split("."))
        for machine in MACHINES:
            names = [f"manylinux_2_{glibc}_{machine}" for glibc in glibc_minors]
            names += [
                f"{name}_{machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1", "linux")
            ]
            tags.update(cpython_tags((major, minor), platforms=names))
            tags.update(compatible_tags((major, minor), f"cp{major}{minor}", names))
    return frozenset(tags)


def wheels_in(listing: Mapping[str, Any], version: Version, tags: frozenset[Tag]) -> Iterator[str]:
    """Yield the hashes of the wheels of one version with one of the tags in an index's answer about one package."""
    for file in listing["files"]:
        try:
            _, found, _, of_wheel = parse_wheel_filename(file["filename"])
        except InvalidWheelFilename:  # a source distribution, or a wheel of long ago
            continue
        if found == version and not tags.isdisjoint(of_wheel):
            yield file["hashes"]["sha256"]


def sources_in(listing: Mapping[str, Any], version: Version) -> Iterator[str]:
    """Yield the hashes of the source distributions of one version."""
    for file in listing["files"]:
        try:
            found = parse_sdist_filename(file["filename"])[1]
        except InvalidSdistFilename:
            continue
        if found == version:
            yield file["hashes"]["sha256"]


def hashes_in(listing: Mapping[str, Any], version: Version) -> list[str]:
    """Return the hashes of the files to install of one version: of its oldest C library, else of its sources."""
    found = (
        {*wheels_in(listing, version, supported())}
        or {*wheels_in(listing, version, supported(NEWER_GLIBC_MINORS))}
        or {*sources_in(listing, version)}
    )
    return sorted(found)


def ask_index(package: str) -> dict[str, Any]:
    """Return what the index that pip uses answers about a package. OSError if it does not answer."""
    index = os.environ.get("PIP_INDEX_URL", PyPI.simple_url).rstrip("/")
    request = urllib.request.Request(f"{index}/{package}/", headers={"Accept": _JSON})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        listing: dict[str, Any] = json.load(answer)
    return listing


def hashes_of(pin: str) -> list[str]:
    """Return the hashes of a pin; ask the index for them. LookupError if it has no file to install."""
    found = hashes_in(ask_index(name_of(pin)), version_of(pin))
    if not found:
        raise LookupError(f"{pin}: the index has no file of it for a supported Python and machine")
    return found


def locked(text: str, hashes: Mapping[str, Sequence[str]]) -> str:
    """Return a requirement file with these hashes, in the order of the names."""
    lines = [
        _INDENT.join([pin, *(f"--hash=sha256:{sha256}" for sha256 in hashes[pin])])
        for pin in sorted(pins_of(text), key=name_of)
    ]
    return header_of(text) + "".join(f"{line}\n" for line in lines)


def main(files: Sequence[str]) -> int:
    """Rewrite the files. A pin of several files is asked for once."""
    known: dict[str, list[str]] = {}
    for path in map(Path, files):
        text = path.read_text()
        pins = pins_of(text)
        known |= {pin: hashes_of(pin) for pin in pins if pin not in known}
        path.write_text(locked(text, known))
        sys.stdout.write(f"{path}: {len(pins)} packages\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
