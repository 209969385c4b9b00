"""An HTTP client for untrusted servers: hubs, indexes and registries."""
