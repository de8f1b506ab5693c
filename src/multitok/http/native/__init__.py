"""The native API: /generate, /tokenize, /detokenize, /abort_request."""
