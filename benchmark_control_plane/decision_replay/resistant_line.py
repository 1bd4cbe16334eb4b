"""A straight line through points of which some are far off (Tukey 1970).

The line joins the medians of the outer thirds of the points, so that a third of each may be outliers.
"""

from collections.abc import Sequence

import numpy as np


def resistant_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope; a slope of 0 if the thirds do not differ in x, (0, 0) without points."""
    if not len(xs):
        return 0.0, 0.0
    x, y = np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)
    low, high = np.quantile(x, (1 / 3, 2 / 3))
    left, right = x <= low, x >= high
    run = float(np.median(x[right]) - np.median(x[left]))
    slope = float(np.median(y[right]) - np.median(y[left])) / run if run > 0 else 0.0
    return float(np.median(y - slope * x)), slope
