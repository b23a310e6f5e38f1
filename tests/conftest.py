"""The fixtures of all tests."""

from pipegraph.testing import no_leaks as no_leaks
