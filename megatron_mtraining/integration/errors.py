"""The error that stops a run before its first step."""

from __future__ import annotations


class RefusedError(ValueError):
    """A request that the plugin cannot fulfil. The message is one line: the option, its value and what is valid
    instead.

    It takes a single string, so that Megatron's ``build_module``, which builds a new exception of the same type
    around the message, can pass it on.
    """
