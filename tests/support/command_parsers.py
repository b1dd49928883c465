"""Parsers of commands, as objects."""

import pytest

from spreeze.cli.arguments import Parser


def parser_of(main):
    """The parser that a command's ``main`` makes; the command is not run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parser, "run", lambda parser, argv, command: parser)
        return main([])
