"""``pg.DataLoader``: torch's ``DataLoader``, with its arguments and its batches, on pipegraph's workers.

``torch_dataloader`` is what users see; ``index_feed`` brings indices to the workers, ``batch_sources`` fetch batches
there, as ``dataset_worker`` has set them up; ``index_state`` and ``batch_progress`` are what a state is made of.
"""

from pipegraph.dataloader.torch_dataloader import DataLoader as DataLoader
