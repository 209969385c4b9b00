"""HTTP as a client of places that nobody vouches for: hubs, indexes and registries."""
