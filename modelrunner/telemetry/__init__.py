"""The counts and records of requests: metrics, the last requests, and usage by day."""
