"""Remote stages: workers call their operators through hosts: a process, a Ray actor or a thread."""
