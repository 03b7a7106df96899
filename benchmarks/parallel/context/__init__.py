"""Context parallelism: time, memory, a slow link, the longest sequence."""
