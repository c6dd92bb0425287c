"""Gives a module another forward by giving it another class, made of a `Form` and its own class; and takes it back.

The module object stays, with its parameters, buffers, hooks and attributes, so whoever holds it holds the converted
one; `isinstance`, the class's name and the forward's signature stay too. What the form remembers is in one attribute. A
module pickles and deep-copies as what it is; `restore_` leaves no trace.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

REMEMBERED = "takeback_form"  #: the attribute of a converted module in which its form keeps what it knows


class Form:
    """A forward that stands before a module's own. Subclasses define `converted(*args, **kwargs)`."""

    original: type[nn.Module]

    def converted(self, *args: Any, **kwargs: Any) -> Any:
        """The new forward."""
        raise NotImplementedError

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self.original.forward(self, *args, **kwargs)

    def extra_repr(self) -> str:
        own = self.original.extra_repr(self)
        return f"{own}, {type(self).__mro__[1].__name__}" if own else type(self).__mro__[1].__name__

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _remade, (self.original, type(self).__mro__[1]), self.__getstate__()


def swap_(module: nn.Module, form: type[Form], remembered: object) -> None:
    """Let `form` run in place of the module's forward."""
    vars(module)[REMEMBERED] = remembered
    module.__class__ = _swapped(type(module), form)


def restore_(module: nn.Module) -> None:
    """The module as it was."""
    assert isinstance(module, Form)
    vars(module).pop(REMEMBERED, None)
    module.__class__ = module.original


_classes: dict[tuple[Any, Any], Any] = {}  #: made so far, by class and form


def _swapped(original: Any, form: Any) -> Any:
    if (original, form) not in _classes:

        @functools.wraps(original.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self.converted(*args, **kwargs)

        names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
        made = type(original.__name__, (form, original), {**names, "original": original, "forward": forward})
        _classes.setdefault((original, form), made)
    return _classes[original, form]


def _remade(original: type[nn.Module], form: type[Form]) -> nn.Module:
    made = _swapped(original, form)
    return made.__new__(made)


def argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The one argument of a call, however it was given; None if there is not exactly one."""
    given = (*args, *kwargs.values())
    return given[0] if len(given) == 1 else None
