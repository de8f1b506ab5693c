"""multitok: the CPU side of LLM serving, scaled over processes."""

__version__ = "0.1.0"
