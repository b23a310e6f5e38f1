"""``python -m pipegraph.cli``."""

import sys

from pipegraph.cli import main

sys.exit(main())
