"""The life of a pipeline that a training loop iterates: passes, epochs, states, ranks, the end.

``loader`` is what users hold, ``epoch_pass`` the iterator of one ``for``, ``position`` how far it has got, ``state``
how that is saved and restored.
"""
