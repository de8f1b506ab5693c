"""MultiTokenizerRouter and the rank choice."""
