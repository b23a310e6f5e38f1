"""Decoding one region of one encoded image into given memory: pure functions and backends, no pipeline.

For each sample: ``probe`` its header, choose a ``crop_window`` by the header's size
and the sample's own random numbers, and let a backend decode that window into a
slot of the batch. ``normalize_into`` turns a batch of uint8 into normalised floats.
"""
