"""Defenses, one file a family, each acting where it really acts."""
