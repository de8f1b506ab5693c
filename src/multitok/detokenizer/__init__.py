"""Ids to text, incrementally; stop strings."""
