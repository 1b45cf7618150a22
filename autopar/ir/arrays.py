"""Types of NumPy arrays. Candidates of a search and layouts of a model are priced as arrays, one element each."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]  # of float64; NumPy types the result of most operators on it as Any
Integers = NDArray[np.int64]
