"""The Python API: what the commands `run` and `attack` do, as functions that return an `Outcome`."""
