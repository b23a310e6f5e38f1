"""pipegraph: a pipeline-graph data loading framework for PyTorch."""
