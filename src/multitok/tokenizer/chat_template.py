"""Chat templates: messages to prompt text, as Hugging Face's `apply_chat_template` does it, in a sandbox.

`ChatTemplate` is the only door. Behind it `jinja2` has the last word; `minijinja` is asked first where it has shown
that it gives the same text.
"""

from __future__ import annotations

import datetime
import functools
import json
import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal, cast

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from multitok.tokenizer.content_format import content_format, tests_for_string
from multitok.tokenizer.errors import ChatTemplateError, TemplateError
from multitok.tokenizer.fast_template import FastTemplate, is_plain
from multitok.tokenizer.template_dialect import outside_of_dialect
from multitok.tokenizer.template_limits import MOST_SECONDS, BoundedEnvironment, TemplateTooLarge, time_limit
from multitok.tokenizer.template_probe import first_difference

logger = logging.getLogger(__name__)

Message = dict[str, Any]

_PROBE_TEXT = "the quick brown fox: 1, 2, 3"
# For one conversation of a few turns; what needs more is not rendered in the event loop.
_PROBE_SECONDS = 1.0
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# Names that a request's chat_template_kwargs must not take from the template.
_RESERVED = frozenset({"messages", "bos_token", "eos_token", "raise_exception", "strftime_now", "namespace", "dict"})


class ChatTemplate:
    """A compiled chat template.

    Parameters
    ----------
    source : str
        The template, in Jinja.
    bos_token, eos_token : str or None
        Texts that the template may name.
    fast : bool
        Whether to try the fast engine at all.

    Raises
    ------
    TemplateError
        When it doesn't compile.

    Attributes
    ----------
    engine : {'minijinja', 'jinja2'}
        Which library renders; the second also does what the first one refuses or could print differently.
    content_format : {'string', 'parts'}
        Whether the template expects a message's content as one string or walks over its parts.
    """

    def __init__(self, source: str, bos_token: str | None, eos_token: str | None, *, fast: bool = True) -> None:
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.compile_bounded(environment.parse(source))
        except (jinja2.TemplateSyntaxError, SyntaxError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            raise TemplateError(f"the chat template is not valid{f', line {line}' if line else ''}: {error}") from error
        self.content_format: Literal["string", "parts"] = content_format(tree)
        # A template that only knows lists would walk over the letters of a string.
        self._wrap_strings = self.content_format == "parts" and not tests_for_string(tree)
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._fast = self._fast_template(source, environment) if fast else None
        self.engine: Literal["minijinja", "jinja2"] = "jinja2" if self._fast is None else "minijinja"

    @functools.cached_property
    def keeps_text(self) -> bool:
        """Whether the prompt holds the text of a conversation's last message, as a probe shows."""
        try:
            return _PROBE_TEXT in self.render([{"role": "user", "content": _PROBE_TEXT}])
        except ChatTemplateError:
            return False

    def render(
        self,
        messages: list[Message],
        large: bool = False,
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        **chat_template_kwargs: Any,
    ) -> str:
        """Render messages to the prompt's text; it holds BOS where the template says so, so encode it without.

        Parameters
        ----------
        messages : list of dict
            As in the API; content is a string or a list of text parts. Not changed.
        large : bool
            They are, and a thread renders them: by `jinja2`, which holds the interpreter's lock for no longer than a
            step of it takes, where `minijinja` holds it to the end.
        add_generation_prompt : bool
            End with the beginning of the assistant's turn; ignored with `continue_final_message`.
        continue_final_message : bool
            Leave the last message open, so that the model goes on with it.
        tools, documents : list of dict or None
            What the template knows under these names.
        **chat_template_kwargs
            Further variables of the template, such as ``enable_thinking``.

        Raises
        ------
        ChatTemplateError
            With the template's own words where it refuses the messages.
        TemplateTooLarge
            It makes too much, or takes longer than `time_limit` allows, or `MOST_SECONDS`.
        """
        variables, tail = self._variables(
            messages, add_generation_prompt, continue_final_message, tools, documents, chat_template_kwargs
        )
        text = None if large or self._fast is None else self._render_fast(self._fast, variables)
        if text is None:
            text = self._render_reference(variables)
        return text if tail is None else _cut_after(text, tail)

    def _variables(
        self,
        messages: list[Message],
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[dict[str, Any]] | None,
        documents: list[dict[str, Any]] | None,
        chat_template_kwargs: dict[str, Any],
    ) -> tuple[dict[str, Any], str | None]:
        """Return what the template sees, and the text after which the result ends."""
        reserved = _RESERVED.intersection(chat_template_kwargs)
        if reserved:
            raise ChatTemplateError(f"chat_template_kwargs must not set {', '.join(sorted(reserved))}")
        prepared = [self._prepare(message) for message in messages]
        tail = _open_final_message(prepared) if continue_final_message else None
        variables = {
            "messages": prepared,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            **self._tokens,
            **chat_template_kwargs,
        }
        return variables, tail

    @staticmethod
    def _render_fast(fast: FastTemplate, variables: dict[str, Any]) -> str | None:
        try:
            if not all(value is None or is_plain(value) for value in variables.values()):
                return None
            return fast.render(variables)
        except Exception as error:  # refusals of the template are among them: the reference says them in its words
            logger.debug("minijinja doesn't render these messages: %s", error)
            return None

    def _render_reference(self, variables: dict[str, Any]) -> str:
        try:
            with time_limit(MOST_SECONDS):
                return self._template.render(variables)
        except TemplateTooLarge:
            raise
        except jinja2.UndefinedError as error:
            raise ChatTemplateError(f"the chat template misses something in these messages: {error}") from error
        except jinja2.TemplateError as error:
            # What raise_exception() was given, or the sandbox's refusal.
            raise ChatTemplateError(str(error)) from error
        except Exception as error:  # a template is a program: with odd messages it can fail in any way
            raise ChatTemplateError(f"the chat template can't render these messages: {error}") from error

    def _fast_template(self, source: str, environment: BoundedEnvironment) -> FastTemplate | None:
        """Make the fast template where it is known to print the same."""
        # Parsed anew: compiling has folded constants in the other tree.
        reason = outside_of_dialect(environment, source, environment.parse(source))
        if reason is None:
            try:
                fast = FastTemplate(source, _FUNCTIONS, _to_json)
                reason = first_difference(self._reference_or_none, functools.partial(self._fast_or_none, fast))
            except Exception as error:  # a tag that it doesn't know, or whatever else it finds wrong
                reason = str(error)
        if reason is None:
            return fast
        logger.info("the chat template is rendered by jinja2, not by the faster minijinja: %s", reason)
        return None

    def _reference_or_none(self, messages: list[Message], **options: Any) -> str | None:
        try:
            variables, _ = self._probe_variables(messages, options)
            with time_limit(_PROBE_SECONDS):
                return self._render_reference(variables)
        except TemplateTooLarge:
            # Not a template to try another engine on, which sees less of what it does.
            raise
        except ChatTemplateError:
            return None

    def _fast_or_none(self, fast: FastTemplate, messages: list[Message], **options: Any) -> str | None:
        try:
            variables, _ = self._probe_variables(messages, options)
        except ChatTemplateError:
            return None
        return self._render_fast(fast, variables)

    def _probe_variables(self, messages: list[Message], options: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        names = ("add_generation_prompt", "continue_final_message", "tools", "documents")
        generation, continuing, tools, documents = (options.get(name) for name in names)
        kwargs = {key: value for key, value in options.items() if key not in names}
        return self._variables(messages, bool(generation), bool(continuing), tools, documents, kwargs)

    def _prepare(self, message: Message) -> Message:
        # Templates handle a key that is absent, but print "None" for one that is null.
        prepared = {key: value for key, value in message.items() if value is not None}
        calls = prepared.get("tool_calls")
        if isinstance(calls, list):
            prepared["tool_calls"] = [_with_arguments(call) for call in calls]
        # An assistant's message that only calls tools has none; templates add it to text all the same.
        content = prepared.setdefault("content", "")
        if isinstance(content, list):
            texts = [_part_text(part) for part in content]
            if self.content_format == "string":
                prepared["content"] = "\n".join(texts)
            else:
                prepared["content"] = [{"type": "text", "text": text} for text in texts]
        elif isinstance(content, str) and self._wrap_strings:
            prepared["content"] = [{"type": "text", "text": content}]
        return prepared


def _with_arguments(call: Any) -> Any:
    """Return a tool call whose arguments are an object, as templates want them; the API has them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        value = msgspec.json.decode(arguments) if arguments else {}
    except (msgspec.DecodeError, ValueError, RecursionError):
        # A model may have written it; its template says what becomes of it.
        return call
    return {**call, "function": {**function, "arguments": value}} if isinstance(value, dict) else call


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(text, str):
        raise ChatTemplateError(f"content part of type {kind!r} is not supported; this model takes text parts only")
    return text


def _open_final_message(messages: list[Message]) -> str:
    """Mark the end of the last message's text; returns that text."""
    final = messages[-1] if messages else {}
    content = final.get("content")
    if isinstance(content, str) and content:
        final["content"] = content + _TAG
        return content
    if isinstance(content, list) and content:
        text = cast("str", content[-1]["text"])
        content[-1]["text"] = text + _TAG
        return text
    raise ChatTemplateError("continue_final_message needs a last message with text")


def _cut_after(rendered: str, text: str) -> str:
    end = rendered.rfind(_TAG.strip())
    if end < 0 or text.strip() not in rendered:
        raise ChatTemplateError("continue_final_message: the chat template leaves out the text of the last message")
    # The tag's trailing space tells whether the template strips what it is given.
    return rendered[:end] if rendered.startswith(_TAG, end) else rendered[:end].rstrip()


class _GenerationTag(Extension):
    """``{% generation %}``: marks the assistant's text for training; here it prints its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """Jinja's ``namespace()`` without names that begin with an underscore, as in Hugging Face."""

    # No self among the names, so that namespace(self=...) works.
    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can't hold {name!r}")


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which the models never saw.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


# Those that both engines take from here.
_FUNCTIONS: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}


def _dict(*args: Iterable[Any], **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.globals.update(_FUNCTIONS, namespace=_SafeNamespace, dict=_dict)
    environment.filters["tojson"] = _to_json
    return environment
