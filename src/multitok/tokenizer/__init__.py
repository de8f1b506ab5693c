"""A request's life in one HTTP process: tokenization, state, results, abort."""
