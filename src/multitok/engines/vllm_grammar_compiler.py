"""The process in which a grammar has its first token, before it can hold up vLLM's core.

vLLM enforces grammars inside its step, and xgrammar, its default, takes minutes for each token of some short ones: all
other requests would wait. So each new grammar is tried here first, within a limit of CPU time that the kernel enforces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import xgrammar
from transformers import PreTrainedTokenizerFast

from multitok.engines.grammar_server import serve_grammars
from multitok.messages.sampling import Grammar


def load_checker(tokenizer_file: str, vocab_size: int) -> Callable[[Grammar], str]:
    """Return what tries a grammar with a tokenizer.json's vocabulary."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer_file)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=[0])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    bitmask = xgrammar.allocate_token_bitmask(1, info.vocab_size)

    def check(grammar: Grammar) -> str:
        try:
            compiled = _compile(compiler, grammar)
        except (RuntimeError, ValueError):
            # vLLM has checked it: another of its backends takes it.
            return ""
        xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(bitmask)
        return ""

    return check


def _compile(compiler: xgrammar.GrammarCompiler, grammar: Grammar) -> xgrammar.CompiledGrammar:
    match grammar.kind:
        case "json_object":
            return compiler.compile_json_schema('{"type": "object"}')
        case "json_schema":
            return compiler.compile_json_schema(grammar.text)
        case "regex":
            return compiler.compile_regex(grammar.text)
        case "ebnf":
            return compiler.compile_grammar(grammar.text)


if __name__ == "__main__":
    serve_grammars(partial(load_checker, sys.argv[1], int(sys.argv[2])))
