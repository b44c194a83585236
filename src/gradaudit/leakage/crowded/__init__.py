"""Sentences of a batch that fills the row space: no row is told from others, but signals are."""
