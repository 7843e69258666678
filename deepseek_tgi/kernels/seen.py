"""What is the same in every layer of a step: operands that have been checked, and what was worked out from them.

Choice: tensors are told apart by identity, which costs less than any look at them. Prevents: prompts of a few hundred
tokens that wait for the host, which would check and work out the same for every layer. Rejected: addresses, which come
back with other contents.
"""

from __future__ import annotations

from typing import Generic, TypeVar
from weakref import ref

T = TypeVar("T")


class Seen(Generic[T]):
    """What was worked out from the operands of the last `note`. Keeps none of them alive.

    For what a tensor keeps (shape, dtype, strides) or nobody writes during a step; where it lies may change.
    """

    __slots__ = ("_made", "_refs", "_values")

    def __init__(self) -> None:
        self._refs: tuple[ref[object], ...] = ()
        self._values: object = None
        self._made: T | None = None

    def of(self, operands: tuple[object, ...], values: object = None) -> T | None:
        """What was noted of these very objects and of equal `values`; None of any others."""
        refs = self._refs
        if len(refs) != len(operands) or self._values != values:
            return None
        for held, operand in zip(refs, operands):  # noqa: B905 - of one length, and asked in every layer
            if held() is not operand:
                return None
        return self._made

    def note(self, made: T, operands: tuple[object, ...], values: object = None) -> T:
        """Keep `made` of them, and return it."""
        self._refs = tuple(ref(operand) for operand in operands)
        self._values, self._made = values, made
        return made
