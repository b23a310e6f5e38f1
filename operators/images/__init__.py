"""Decoding one region of one encoded image into given memory: pure functions and backends, no pipeline.

For each sample: ``probe`` its header, ``draw`` a crop window from the header's size
and the sample's own generator, and let a ``Backend`` decode that window into a
slot of the batch. ``normalize_into`` turns a batch of uint8 into normalised floats.
"""

from pipegraph.operators.images.choice import BACKENDS as BACKENDS
from pipegraph.operators.images.choice import family_of as family_of
from pipegraph.operators.images.choice import known_calibration as known_calibration
from pipegraph.operators.images.choice import note_of as note_of
from pipegraph.operators.images.choice import open_backend as open_backend
from pipegraph.operators.images.crop import CenterCrop as CenterCrop
from pipegraph.operators.images.crop import Crop as Crop
from pipegraph.operators.images.crop import CropWindow as CropWindow
from pipegraph.operators.images.crop import RandomResizedCrop as RandomResizedCrop
from pipegraph.operators.images.crop import Region as Region
from pipegraph.operators.images.crop import check_crop as check_crop
from pipegraph.operators.images.crop import crop_window as crop_window
from pipegraph.operators.images.crop import draw as draw
from pipegraph.operators.images.decoder import INTERPOLATIONS as INTERPOLATIONS
from pipegraph.operators.images.decoder import ImageBackend as ImageBackend
from pipegraph.operators.images.decoder import Interpolation as Interpolation
from pipegraph.operators.images.decoder import check_interpolation as check_interpolation
from pipegraph.operators.images.header import MAX_PIXELS as MAX_PIXELS
from pipegraph.operators.images.header import Header as Header
from pipegraph.operators.images.header import probe as probe
