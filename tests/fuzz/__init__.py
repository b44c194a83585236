"""Hostile inputs of every kind: a short run with the tests, a long one by hand (`python -m fuzz.long`)."""
