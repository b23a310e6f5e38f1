"""The fixtures of the operators' tests."""

from pipegraph.testing import no_leaks as no_leaks
