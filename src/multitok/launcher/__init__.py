"""The parent process: start order, supervision, shared memory, load board."""
