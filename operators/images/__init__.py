"""Decoding one region of one encoded image into given memory: pure functions and backends, no pipeline.

For each sample: ``probe`` its header, choose a ``crop_window`` by the header's size
and the sample's own random numbers, and let a backend decode that window into a
slot of the batch. ``normalize_into`` turns a batch of uint8 into normalised floats.
"""

from pipegraph.operators.images.choice import (
    BACKENDS as BACKENDS,
    family_of as family_of,
    note_of as note_of,
    open_backend as open_backend,
)
from pipegraph.operators.images.crop import (
    CenterCrop as CenterCrop,
    Crop as Crop,
    CropWindow as CropWindow,
    RandomResizedCrop as RandomResizedCrop,
    Region as Region,
    check_crop as check_crop,
    crop_window as crop_window,
)
from pipegraph.operators.images.decoder import (
    INTERPOLATIONS as INTERPOLATIONS,
    ImageBackend as ImageBackend,
    Interpolation as Interpolation,
    check_interpolation as check_interpolation,
)
from pipegraph.operators.images.header import MAX_PIXELS as MAX_PIXELS, Header as Header, probe as probe
