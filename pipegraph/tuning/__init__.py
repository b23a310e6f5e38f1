"""Finding workers and capacities during training.

``search`` decides, from the windows that ``tuner`` measures, with the model of the pipeline (``profile.model``);
``decisions`` say what was done and why.
"""
