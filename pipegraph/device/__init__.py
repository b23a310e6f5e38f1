"""Slots, streams, events and memory of devices. Mechanism: knows no graph and no model.

Open a backend with ``accelerator.backend_for``; its opener must close it.
"""
