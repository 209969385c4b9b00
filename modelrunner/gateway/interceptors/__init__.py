"""Requests that another request answers: shared, remembered, sent together, or resumed."""
