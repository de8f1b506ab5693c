"""The ``remote`` engine: token ids over HTTP to engines that already run elsewhere."""
