"""Makes the helpers of `tests/failures` importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "failures"))
