"""python -m bench.instructions: see __init__.py."""

import argparse
import sys

from bench.instructions import PARTS, TOLERANCE, CannotCount, check_possible, compare, record, recorded_counts


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.instructions", description="How many instructions a call takes."
    )
    parser.add_argument("--record", action="store_true", help="write counts.json again")
    args = parser.parse_args()
    grown = False
    try:
        check_possible()
        if args.record:
            record()
        for part, count in PARTS.items():
            for change in compare(recorded_counts(part), count()):
                print(change)
                grown |= change.growth > TOLERANCE
    except CannotCount as e:
        print(e, file=sys.stderr)
        return 2
    return int(grown)


if __name__ == "__main__":
    sys.exit(main())
