"""What adapters give away: words and sentences from fewer directions than tokens."""
