"""The fixtures of all tests."""

import os

# Several test processes share the machine: in each of them OpenMP's threads would spin while they wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pipegraph.testing import no_leaks as no_leaks
