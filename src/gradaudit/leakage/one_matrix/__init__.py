"""Sentences from whatever matrix was shared, dropout off: candidates are held against the span of its inputs."""
