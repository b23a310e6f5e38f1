"""Finding workers and capacities during training.

``search`` decides, from the windows that ``tuner`` measures, with the model of the pipeline (``profile.model``);
``decisions`` say what was done and why.
"""

from pipegraph.profile.model import Size as Size
from pipegraph.tuning.decisions import Decision as Decision, Tuning as Tuning
