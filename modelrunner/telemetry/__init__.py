"""What is counted and kept about requests: metrics, the last requests, and usage by day."""
