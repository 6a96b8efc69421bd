"""How often to save: the interval that loses the least time to saves and failures together.

Failures are taken as a Poisson process (memoryless, independent of each other and of the job) with mean time M
between those that end the job; machines that fail independently add up: M = M_node / nodes. All times in seconds, D
the time of training that a save costs, R the time from a failure until training goes on where it was saved.

    Young 1974   T = sqrt(2 D M)
    Daly 2006    T = sqrt(2 D M) (1 + sqrt(D / 2M) / 3 + (D / 2M) / 9) - D     for D < 2M, else M

T is training time between the end of one save and the start of the next. The share of wall-clock time that is lost
is, exactly under these assumptions (Daly 2006), 1 - T / (M exp(R/M) (exp((T + D)/M) - 1)).

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006.
"""

from __future__ import annotations

from math import exp, expm1, inf, isfinite, sqrt


def young_s(save_s: float, mtbf_s: float) -> float:
    """First-order optimum interval."""
    return sqrt(2 * save_s * mtbf_s)


def daly_s(save_s: float, mtbf_s: float) -> float:
    """Higher-order optimum interval; within a percent of the exact one wherever saving makes sense."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    share = save_s / (2 * mtbf_s)
    return young_s(save_s, mtbf_s) * (1 + sqrt(share) / 3 + share / 9) - save_s


def lost_share(interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share (0 to 1) of wall-clock time that saves, lost work and restarts take at this interval."""
    if interval_s <= 0 or not isfinite(mtbf_s):
        return 1.0 if interval_s <= 0 else save_s / (interval_s + save_s)
    exponent = (interval_s + save_s) / mtbf_s
    if exponent > 700 or restart_s / mtbf_s > 700:
        return 1.0              # a stretch between two saves is practically never survived
    wall = mtbf_s * exp(restart_s / mtbf_s) * expm1(exponent)
    return max(0.0, 1.0 - interval_s / wall) if wall < inf else 1.0
