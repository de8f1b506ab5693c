"""Errors of this package that a user reads."""

from __future__ import annotations


class ModelError(Exception):
    """A model or tokenizer that can't be used; the message says what to do. The command line exits with status 2."""


class TemplateError(ValueError):
    """A chat template that doesn't compile."""


class ChatTemplateError(ValueError):
    """Messages that the chat template refuses or can't render; the message is meant for the client (status 400)."""
