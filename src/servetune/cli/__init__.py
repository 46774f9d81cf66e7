"""Arguments in, words and exit codes out. One file a command, no logic.

Exit codes: 0 measured; 1 measured but void or with failures; 2 wrong usage; 3 endpoint not usable.
"""

from __future__ import annotations

import sys

MEASURED, NOT_VALID, WRONG_USAGE, NOT_USABLE = 0, 1, 2, 3
INTERRUPTED = 130


def main() -> None:
    """Entry point of the `servetune` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    from cyclopts import App, CycloptsError

    from servetune import __version__
    from servetune.cli.bench import bench
    from servetune.cli.report import report
    from servetune.spec import SpecError

    app = App(
        name="servetune",
        version=__version__,
        help="Find the fastest valid way to serve a model on your hardware, for your traffic, and prove it.",
        suppress_keyboard_interrupt=False,
    )
    app.command(bench)
    app.command(report)
    try:
        return app(arguments, exit_on_error=False, print_error=False, result_action="return_value") or 0
    except (CycloptsError, SpecError) as error:
        print(f"servetune: {error}", file=sys.stderr)
        return WRONG_USAGE
    except OSError as error:
        print(f"servetune: {error}", file=sys.stderr)
        return NOT_VALID
    except KeyboardInterrupt:
        print("servetune: interrupted before anything was measured", file=sys.stderr)
        return INTERRUPTED
