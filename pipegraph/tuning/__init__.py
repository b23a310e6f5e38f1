"""Finding workers and capacities during training.

``search`` decides, from the windows of ``facts`` that ``tuner`` measures, with the ``model`` of the pipeline;
``decisions`` say what was done and why.
"""

from pipegraph.tuning.decisions import Decision as Decision, Tuning as Tuning
from pipegraph.tuning.facts import Size as Size
