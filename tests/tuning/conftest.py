from pipegraph.testing import no_leaks

__all__ = ["no_leaks"]
