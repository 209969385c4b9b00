"""The daemon's operations on models and engines, for routes and other front ends: no HTTP, no wire structs."""
