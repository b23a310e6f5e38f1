"""What a running pipeline has measured of itself, and what that says."""
