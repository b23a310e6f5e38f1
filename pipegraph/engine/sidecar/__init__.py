"""The sidecar of ``loader(isolate=True)``: a process in which the host's part of a plan runs."""
