"""The HTTP server: protocol, routes by API family, SSE, errors."""
