"""How the daemon holds its backends, so that none of them can hurt another's models."""
