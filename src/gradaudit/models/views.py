"""Views: which part of which parameter is the matrix of a role."""

from dataclasses import dataclass

from torch import Tensor

ROLES = ("q", "k", "v", "o", "f", "p")
"""Matrices of a block: query, key, value, attention output, feed-forward in (gate and up) and out (projection)."""


@dataclass(frozen=True)
class View:
    """A named window onto one parameter: the [out, in] matrix of a role, or a whole parameter.

    A role is a view and not a parameter: GPT-2's q, k and v are thirds of one transposed matrix.

    Args:
        name: "0.q", "3.f.gate", or the parameter's own name.
        parameter: the parameter it looks at.
        rows: the slice along the output axis, after transposing; None for all.
        transpose: True when the parameter is stored [in, out].
    """

    name: str
    parameter: str
    rows: tuple[int, int] | None = None
    transpose: bool = False

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the window's part of the parameter (or of its gradient)."""
        seen = tensor.T if self.transpose else tensor
        return seen if self.rows is None else seen[self.rows[0] : self.rows[1]]
