"""How large a grammar may be: past this, libraries that compile grammars run out of their stack."""

from __future__ import annotations

from multitok.messages.sampling import Grammar

MAX_TEXT = 65536
# Deeper nesting is what the compiler recurses on until its stack ends.
MAX_NESTING = 128


def problem_of_size(grammar: Grammar) -> str:
    """Return which limit a grammar breaks, if any."""
    if len(grammar.text) > MAX_TEXT:
        return f"it is longer than {MAX_TEXT} characters"
    depth = deepest = 0
    for character in grammar.text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return f"it is nested deeper than {MAX_NESTING} levels" if deepest > MAX_NESTING else ""
