"""Which ranks ended with other weights than the first. Ranks that meet at the end compare themselves (reducers.py);
those of msrun, which do not, tell the launcher, and it compares those of its machine (launch.py).
"""

import math

SAME = 1e-4  # of the weights' norm; rounding is far below


def others(rows):
    """Places in [(norm, sum, network, unknown)], as reducers.py has them of the ranks; none if it cannot be told."""
    norm, seen, network, _ = rows[0]
    if any(row[3] or row[2] != network for row in rows) or not any(math.isfinite(row[1]) for row in rows):
        return []
    return [rank for rank, row in enumerate(rows) if not abs(row[1] - seen) <= SAME * norm and rank > 0]


def warning(ranks, first, why):
    return f"warning: rank {' '.join(map(str, ranks))} ended with other weights than rank {first}; {why}"
