"""Private text for an audit: the embedded sample, local files and hub ids, drawn into batches."""
