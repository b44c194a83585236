"""Sentences from whatever matrix was shared: candidates are held against the span of its inputs."""
