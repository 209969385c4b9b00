"""The page for browsers: static files, kept in memory with their ETag and compressed. Knows no web framework."""
