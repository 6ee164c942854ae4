"""``python -m telegrad`` is ``telegrad``."""

import sys

from telegrad.cli import main

sys.exit(main())
