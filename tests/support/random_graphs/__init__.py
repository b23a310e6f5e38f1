"""Random graphs for the tests: recipes, the functions of their stages, and sizes that change while they run."""
