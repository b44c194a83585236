"""When a run says that private data leaks."""
