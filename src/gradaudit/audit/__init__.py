"""The audit: a case becomes records, batch by batch."""
