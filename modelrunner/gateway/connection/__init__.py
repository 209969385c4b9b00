"""A client's connection: who may ask, heads and bodies as they come, answers as they go."""
