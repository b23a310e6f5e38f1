"""The standard operators, imported as ``pipegraph.operators``."""

if __name__ != "pipegraph.operators":
    raise ImportError("import pipegraph.operators: the top-level folder 'operators' is not a module")
