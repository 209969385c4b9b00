"""The families of APIs that the daemon speaks: each is one module here, and one line in proxy/routes.py."""
