"""Write docs/schema/bench.json, the JSON schema of what `servetune bench --json` writes.

python scripts/schema.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from servetune.measure import Bench

FILE = Path(__file__).parent.parent / "docs" / "schema" / "bench.json"


def main() -> int:
    text = msgspec.json.format(msgspec.json.encode(msgspec.json.schema(Bench))) + b"\n"
    if "--check" in sys.argv:
        if FILE.read_bytes() != text:
            print(f"{FILE.name} is not what the types say: run python scripts/schema.py", file=sys.stderr)
            return 1
        return 0
    FILE.write_bytes(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
