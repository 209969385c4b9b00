"""Answers that do not come from an exchange of their own: shared, remembered, gathered, or made in several steps."""
