"""Growth over a long time, as rows."""

import numpy as np
from figures import Row


def slope_row(name: str, times: list[float], values: list[float], target: str | None) -> Row:
    """Least-squares slope in per cent of the mean an hour, with its standard error; ``times`` in seconds."""
    hours, seen = np.array(times) / 3600.0, np.array(values)
    (slope, _), covariance = np.polyfit(hours - hours[0], seen, 1, cov=True)
    percent = 100.0 / float(seen.mean())
    return {
        "metric": f"{name}_slope",
        "value": percent * float(slope),
        "unit": "%/h",
        "target": target,
        "standard_error": percent * float(np.sqrt(covariance[0, 0])),
        "first": values[0],
        "last": values[-1],
    }
