"""Other machines as hosts: what a host tells its head, both sides of that, and the membership, which is Ray's."""
