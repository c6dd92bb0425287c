"""A sanitizer for backward passes: `takeback.guard()` catches a node that overwrites what others can still read."""

from takeback.guard.context import Guard, guard

__all__ = ["Guard", "guard"]
