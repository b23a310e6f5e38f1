"""Remote stages: workers call their operators through hosts: a process or a Ray actor."""
