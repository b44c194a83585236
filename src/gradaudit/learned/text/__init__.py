"""Learned inversion of text."""
