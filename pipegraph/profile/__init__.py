"""What a running pipeline has measured of itself, and what that says."""

from __future__ import annotations

from pipegraph.measurements import StageProfile as StageProfile

from .advice import Advice as Advice, Prediction as Prediction
from .bottleneck import (
    CONSUMER as CONSUMER,
    EdgeFacts as EdgeFacts,
    find_bottleneck as find_bottleneck,
    find_lock_holder as find_lock_holder,
)
from .collect import profile_of as profile_of
from .looks import compared as compared
from .values import ChannelProfile as ChannelProfile, Profile as Profile
