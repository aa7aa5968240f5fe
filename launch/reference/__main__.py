"""`python -m rolloutmq.launch.reference DIRECTORY`: write every generated page into a directory."""

import sys
from pathlib import Path

from rolloutmq.launch.reference import cli, configuration, errors, plant, protocol

PAGES = {
    "configuration.md": configuration.page,
    "cli.md": cli.page,
    "errors.md": errors.page,
    "protocol.md": protocol.page,
    "plant.md": plant.page,
}


def main(directory: Path) -> None:
    """Write every page, in place of the one that is there."""
    for name, page in PAGES.items():
        (directory / name).write_text(page())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
