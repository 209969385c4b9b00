"""API keys: who may do what, how often, and with which models."""
