"""What the daemon can do with models and engines, for routes and other front ends: no HTTP, no wire structs."""
