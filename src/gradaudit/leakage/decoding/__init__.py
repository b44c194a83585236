"""Exact decoding: rows with their dropout masks, linked into sentences, and proven."""
