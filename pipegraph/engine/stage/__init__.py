"""A stage: one node of a running plan, channel -> workers -> channel.

``loops`` picks the worker loop for a kind of operator; ``stage_run`` is the state that a stage's loops share;
``failure_policy`` and ``ledger`` handle and record failed items; ``restore`` turns a state's cursor into restarts.
"""
