"""OCI registries (https://github.com/opencontainers/distribution-spec): names, credentials, pulling and pushing."""
