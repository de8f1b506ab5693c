"""Kills parts of a running server at random, under load, and counts what became of every request.

`python -m chaos` (or `make chaos`) starts a server, `chaos.load` is the load, a process of its own whose ledger is what
counts. `killer` carries out a `plan`, `verdict` judges the ledger, `leftovers` compares what is there before and after.
"""
