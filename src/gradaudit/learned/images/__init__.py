"""Learned inversion of images."""
