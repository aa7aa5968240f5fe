"""The metadata that is not written in pyproject.toml: the version, from the tags of git, and the README of an index.

An index shows the README without this repository, so a relative link leads nowhere there. `README_LINKS` names the
repository, for example `https://github.com/OWNER/rolloutmq/{view}/v0.1.0`, where `{view}` becomes `raw` for an image
and `blob` for a page. Without it the links stay as they are.
"""

import os
import re
import subprocess
from pathlib import Path

NEXT = "0.1.0"
"""Release to come before there is a tag, and the version of a copy without git."""
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?:|#)(?P<path>[^)]+)\)")


def version_of(root: Path) -> str:
    """Return the version of a source distribution or a checkout.

    The tag v0.1.0 is 0.1.0, the third commit after it 0.1.0.post3, and the third commit before any tag 0.1.0.dev3.
    """
    metadata = root / "PKG-INFO"
    if metadata.exists():
        (found,) = re.findall(r"^Version: (.+)$", metadata.read_text("utf-8"), re.MULTILINE)
        return str(found)
    if not (root / ".git").exists():  # git would describe the repository around it
        return f"{NEXT}.dev0"
    if described := _git(root, "describe", "--tags", "--long", "--match", "v[0-9]*"):
        tag, commits, _ = described.rsplit("-", 2)
        return tag.removeprefix("v") + (f".post{commits}" if commits != "0" else "")
    return f"{NEXT}.dev{_git(root, 'rev-list', '--count', 'HEAD') or 0}"


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, no tag, or a repository of another user
        return ""
    return done.stdout.strip()


def linked(text: str, base: str) -> str:
    """Return Markdown whose relative links begin with an address; with an empty one, the same text."""

    def absolute(link: re.Match[str]) -> str:
        view = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({base.format(view=view)}/{link['path']})"

    return LINK.sub(absolute, text) if base else text


if __name__ == "__main__":
    from setuptools import setup

    here = Path(__file__).resolve().parent
    setup(
        version=version_of(here),
        long_description=linked((here / "README.md").read_text("utf-8"), os.environ.get("README_LINKS", "")),
        long_description_content_type="text/markdown",
    )
