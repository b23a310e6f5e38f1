"""The engine that runs a plan: channels, memory account, stage loops, worker threads and processes.

``crew`` owns the workers, ``run`` wires the plan for consecutive epochs, ``stage/`` is one node of it, ``process/``
and ``actors/`` run operators in other processes. It knows plans, not graphs.
"""
