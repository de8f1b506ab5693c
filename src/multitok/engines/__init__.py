"""The Engine protocol and one module per engine."""
