"""One request: its admission, its runner, the body for the engine, the answer, its record."""
