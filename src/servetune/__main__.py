"""`python -m servetune` is the `servetune` command."""

from servetune.cli import main

main()
