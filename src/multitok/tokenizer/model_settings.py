"""One of the models of a start: its name, its options and its files."""

from __future__ import annotations

import msgspec

from multitok.config import ServerArgs
from multitok.tokenizer.model_files import ModelFiles


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is to be served. From the start on, everything that belongs to a model is read from here.

    Attributes
    ----------
    name : str
        Name that clients use.
    args : ServerArgs
        The options as they hold for this model: the user's, with the model's own ones in their place.
    files : ModelFiles
        What is known of it before an engine has loaded it.
    """

    name: str
    args: ServerArgs
    files: ModelFiles
