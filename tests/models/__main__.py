"""Makes the models for the tests, unless they are in the cache, and says where."""

from tests.models.prepare import prepared

print(prepared())
