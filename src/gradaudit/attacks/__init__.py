"""Attacks, one file each: an `Observation` goes in, a `Reconstruction` comes out."""
