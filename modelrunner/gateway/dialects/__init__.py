"""The families of APIs that the daemon speaks: each has its modules here, and a line in gateway/routes.py."""
