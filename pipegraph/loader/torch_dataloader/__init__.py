"""``pg.DataLoader``: torch's ``DataLoader``, with its arguments and its batches, on pipegraph's workers.

``dataloader`` is what users see, with its state, which ``batch_progress`` holds; ``pass_iterators`` run its passes;
``batch_sources`` bring indices to the workers, which ``dataset_worker`` sets up, and fetch there.
"""

from pipegraph.loader.torch_dataloader.dataloader import DataLoader as DataLoader
