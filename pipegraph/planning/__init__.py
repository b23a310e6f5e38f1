"""From a graph to what will run: checks, sizes, rewrites, bundles. Pure.

``planner`` decides, with ``checks`` and ``rewrites``; ``plan`` is what comes out, and prints itself.
"""
