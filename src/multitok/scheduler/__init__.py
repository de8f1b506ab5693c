"""Admission, the engine loop and step output."""
