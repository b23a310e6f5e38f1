"""From a graph to what will run: checks, sizes, rewrites, bundles. Pure.

``planner`` decides, with ``rewrites`` and ``bundle_chains``; ``plan`` is what comes out, and prints itself.
"""
