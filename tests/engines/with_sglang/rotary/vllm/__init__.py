"""Stands in for vLLM, of which SGLang takes one function on a CPU without AMX."""
