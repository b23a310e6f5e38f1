"""What a running pipeline has measured of itself, and what that says; here what a loader needs to show it."""

from __future__ import annotations

from .collect import profile_of as profile_of
from .values import Profile as Profile
