"""NumPy's minimum, maximum and where, for closed forms over numbers or arrays. NumPy is loaded by the first call."""

from typing import Any


def minimum(left: Any, right: Any) -> Any:
    """The smaller of two, element by element."""
    import numpy as np

    return np.minimum(left, right)


def maximum(left: Any, right: Any) -> Any:
    """The larger of two, element by element."""
    import numpy as np

    return np.maximum(left, right)


def where(condition: Any, left: Any, right: Any) -> Any:
    """`left` if the condition holds, else `right`, element by element."""
    import numpy as np

    return np.where(condition, left, right)
