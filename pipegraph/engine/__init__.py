"""What runs a plan: channels, the memory account, the loops of stages, worker threads and processes.

``runtime`` owns the workers, ``run`` wires the plan for consecutive epochs, ``stage/`` is one node of it, ``process/``
what a stage has elsewhere. Knows no graph, only plans.
"""
