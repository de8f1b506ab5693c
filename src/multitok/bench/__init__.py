"""Load generator and accounting of ``multitok bench`` and the benchmarks; they see servers from outside only."""
