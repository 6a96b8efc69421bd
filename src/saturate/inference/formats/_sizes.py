"""Does a relation of sizes hold for all sizes from certain ones on? What torch.export records as a guard is often an identity.

Interval arithmetic cannot tell where a size stands on both sides: 2*(s//2) <= s. Here a size is written as m*q + r, once for
each rest r, where m is a multiple of what it is divided by: each floor division and each rest is then a polynomial of the q,
which start at zero, and one without negative coefficients is never negative.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

#: For no more combinations of rests a relation is looked at.
MOST_RESTS = 4096

#: {(exponent of each size, in order): coefficient}, zeros left out; integers only.
Polynomial = dict[tuple[int, ...], int]

_RELATIONS = {"GreaterThan": (1, 0), "StrictGreaterThan": (1, 1), "LessThan": (-1, 0), "StrictLessThan": (-1, 1)}


class _Undecided(Exception):
    """An expression that is not known to be a polynomial of the quotients."""


def always(guard: Any, least: Mapping[Any, int]) -> bool:
    """Whether sympy's relation `guard` is known to be true for all integers from `least` on. False: it is not, or not known."""
    symbols = sorted(least, key=str)
    try:
        needed = _multiples(guard)
        multiples = [needed.get(symbol, 1) for symbol in symbols]
        if math.prod(multiples) > MOST_RESTS:
            return False
        return all(_holds(guard, _sizes(symbols, multiples, rests, least)) for rests in itertools.product(*map(range, multiples)))
    except _Undecided:
        return False


def _sizes(symbols: list[Any], multiples: list[int], rests: tuple[int, ...], least: Mapping[Any, int]) -> dict[Any, Polynomial]:
    """Each size as m*q + r with the first q, at which it is large enough, counted as zero."""
    nothing = (0,) * len(symbols)
    found = {}
    for place, (symbol, multiple, rest) in enumerate(zip(symbols, multiples, rests)):
        first = multiple * -((rest - least[symbol]) // multiple) + rest
        found[symbol] = _sum([{nothing: first}, {(*nothing[:place], 1, *nothing[place + 1:]): multiple}])
    return found


def _multiples(expression: Any) -> dict[Any, int]:
    """By what each size in an expression is divided, one division inside of another included."""
    if expression.is_Symbol:
        return {expression: 1}
    found: dict[Any, int] = {}
    for argument in expression.args:
        for symbol, multiple in _multiples(argument).items():
            found[symbol] = math.lcm(found.get(symbol, 1), multiple)
    divisors = expression.args[1:] if type(expression).__name__ in ("FloorDiv", "Mod", "PythonMod", "IntTrueDiv", "ModularIndexing") else ()
    by = math.prod(int(divisor) for divisor in divisors if divisor.is_Integer and divisor > 0)
    return {symbol: multiple * by for symbol, multiple in found.items()}


def _holds(guard: Any, sizes: dict[Any, Polynomial]) -> bool:
    kind = type(guard).__name__
    if kind in ("BooleanTrue", "And"):
        return all(_holds(one, sizes) for one in guard.args)
    if kind == "Or":
        return any(_holds(one, sizes) for one in guard.args)
    if kind not in (*_RELATIONS, "Unequality", "Equality"):
        return False
    difference = _sum([_polynomial(guard.lhs, sizes), _times(-1, _polynomial(guard.rhs, sizes))])
    if kind == "Equality":
        return not difference
    if kind == "Unequality":
        return _at_least(difference, 1) or _at_least(_times(-1, difference), 1)
    sign, number = _RELATIONS[kind]
    return _at_least(_times(sign, difference), number)


def _at_least(polynomial: Polynomial, number: int) -> bool:
    constant = sum(factor for powers, factor in polynomial.items() if not any(powers))
    return constant >= number and all(factor > 0 for powers, factor in polynomial.items() if any(powers))


def _polynomial(expression: Any, sizes: dict[Any, Polynomial]) -> Polynomial:
    if expression in sizes:
        return sizes[expression]
    if expression.is_Integer:
        return _sum([{(0,) * len(sizes): int(expression)}])
    kind = type(expression).__name__
    if kind in ("FloorToInt", "CeilToInt") and type(expression.args[0]).__name__ == "IntTrueDiv":
        sign = 1 if kind == "FloorToInt" else -1
        above, below = expression.args[0].args
        return _times(sign, _divided(_times(sign, _polynomial(above, sizes)), _polynomial(below, sizes)))
    if kind == "ModularIndexing":
        inner, first, second = (_polynomial(one, sizes) for one in expression.args)
        return _rest(_divided(inner, first), second)
    if kind in ("FloorDiv", "Mod", "PythonMod"):
        return (_divided if kind == "FloorDiv" else _rest)(*(_polynomial(one, sizes) for one in expression.args))
    if kind == "Pow" and expression.exp.is_Integer and 0 <= expression.exp <= 8:
        return _product([_polynomial(expression.base, sizes)] * int(expression.exp), len(sizes))
    found = [_polynomial(one, sizes) for one in expression.args]
    if kind == "Add":
        return _sum(found)
    if kind == "Mul":
        return _product(found, len(sizes))
    if kind in ("Max", "Min"):
        sign = 1 if kind == "Max" else -1
        for one in found:
            if all(_at_least(_times(sign, _sum([one, _times(-1, other)])), 0) for other in found):
                return one
    raise _Undecided


def _sum(polynomials: list[Polynomial]) -> Polynomial:
    found: Polynomial = {}
    for polynomial in polynomials:
        for powers, factor in polynomial.items():
            found[powers] = found.get(powers, 0) + factor
    return {powers: factor for powers, factor in found.items() if factor}


def _times(number: int, polynomial: Polynomial) -> Polynomial:
    return {powers: number * factor for powers, factor in polynomial.items()}


def _product(polynomials: list[Polynomial], sizes: int) -> Polynomial:
    found: Polynomial = {(0,) * sizes: 1}
    for polynomial in polynomials:
        found = _sum([{tuple(map(sum, zip(one, other))): factor * by} for one, factor in found.items() for other, by in polynomial.items()])
    return found


def _divided(above: Polynomial, below: Polynomial) -> Polynomial:
    """Rounded down: where the divisor is a number that divides all but the constant, or the quotient is the same everywhere."""
    if (by := _number(below)) is not None and all(factor % by == 0 for powers, factor in above.items() if any(powers)):
        return _sum([{powers: factor // by for powers, factor in above.items()}])
    ratios = {factor // below[powers] for powers, factor in above.items() if below.get(powers, 0) > 0} | {0}
    for quotient in sorted(ratios | {ratio - 1 for ratio in ratios}):
        rest = _sum([above, _times(-quotient, below)])
        if _at_least(rest, 0) and _at_least(_sum([below, _times(-1, rest)]), 1):
            return _sum([{_nothing(below): quotient}])
    raise _Undecided


def _rest(above: Polynomial, below: Polynomial) -> Polynomial:
    return _sum([above, _times(-1, _product([_divided(above, below), below], len(_nothing(below))))])


def _number(polynomial: Polynomial) -> int | None:
    """A polynomial that is a positive number; None for another one."""
    constant = polynomial.get(_nothing(polynomial), 0) if len(polynomial) == 1 else 0
    return constant if constant > 0 else None


def _nothing(polynomial: Polynomial) -> tuple[int, ...]:
    """The exponents of the constant. Raises _Undecided for zero, which nothing is divided by."""
    if not polynomial:
        raise _Undecided
    return (0,) * len(next(iter(polynomial)))
