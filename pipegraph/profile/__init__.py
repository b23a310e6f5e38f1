"""What a running pipeline has measured of itself, and what that says."""

from __future__ import annotations

from .bottleneck import CONSUMER as CONSUMER
from .bottleneck import EdgeFacts as EdgeFacts
from .bottleneck import find_bottleneck as find_bottleneck
from .bottleneck import find_lock_holder as find_lock_holder
from .collect import profile_of as profile_of
from .values import ChannelProfile as ChannelProfile
from .values import Profile as Profile
from .values import StageProfile as StageProfile
from .what_if import Prediction as Prediction
