"""The program `rolloutmq`: on a system where the package cannot be imported, it says so in one line.

The package raises ImportError there, so this module lies beside it.
"""

import sys


def main() -> None:
    """Run the command line, and exit with its code; 1 where the package refuses the system."""
    try:
        from rolloutmq.launch.cli import main as run
    except ImportError as error:
        if error.name != "rolloutmq":
            raise
        sys.exit(f"rolloutmq: {error}")
    run()
