"""Compare calls and tensors with torch.distributed.rpc only.

It has the options of `python -m bench`.
"""

import subprocess
import sys
from pathlib import Path

ROWS = ("--only", "calls", "--only", "tensors", "--competitors", "telegrad,torch")

if __name__ == "__main__":
    root = Path(__file__).parent.parent
    sys.exit(subprocess.call([sys.executable, "-m", "bench", *ROWS, *sys.argv[1:]], cwd=root))
