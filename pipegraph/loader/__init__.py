"""The loader that a training loop iterates over: passes, epochs, states, ranks and shutdown.

``loader`` is what users hold, ``epoch_pass`` the iterator of one ``for``, ``position`` how far it has got, ``state``
how that is saved and restored.
"""
