"""``pg.DataLoader``: torch's ``DataLoader``, with its arguments and its batches, on pipegraph's workers.

``dataloader`` is what users see; ``index_feed`` brings indices to the workers, ``batch_sources`` fetch batches
there, as ``dataset_worker`` has set them up; ``batch_progress`` is what a state is made of.
"""

from pipegraph.loader.torch_dataloader.dataloader import DataLoader as DataLoader
