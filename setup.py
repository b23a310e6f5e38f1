"""The one compiled part, which is optional; everything else is in pyproject.toml."""

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Of every Python: the compiled part calls nothing of Python's."""
        return "py3", "none", super().get_tag()[2]


rows = Extension(
    "pipegraph.operators.images._rows",
    ["operators/images/rows.c"],
    libraries=["m"],
    extra_compile_args=["-ffp-contract=off"],  # crops are Python's to the last bit
    optional=True,
)
setup(ext_modules=[rows], cmdclass={"bdist_wheel": Wheel})
