"""A griffe extension: the reference describes a field by what its ``measurement(...)`` says of it."""

import ast

import griffe


class Declared(griffe.Extension):
    """Fields of records in ``pipegraph.measurements`` and ``pipegraph.profile.values``."""

    def on_attribute(self, *, attr, **more):
        value = attr.value
        if (
            isinstance(value, griffe.ExprCall)
            and str(value.function) == "measurement"
        ):
            about = ast.literal_eval(str(value.arguments[0]))
            attr.docstring = griffe.Docstring(
                about[0].upper() + about[1:], parent=attr
            )
            attr.value = None
