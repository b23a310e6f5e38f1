"""One node of a running plan: channel -> workers -> channel.

``loops`` picks the loop for a kind of operator; ``stage_run`` is what a stage's loops share; ``failure_policy`` and
``ledger`` say what becomes of failed items; ``restore`` turns the cursor of a state into restarts.
"""
