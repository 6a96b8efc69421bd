"""Nulls of a record's JSON that no reason stands beside."""

from __future__ import annotations

#: Not "cannot be known": what was compared with nothing has no threshold (records.analysis.Evidence).
NO_SUCH_THING = {"findings.evidence.threshold"}


def unreasoned(value, path=(), above=()):
    """The dotted paths of nulls of which neither their own object's `unknown` nor that of one around it tells anything."""
    if isinstance(value, dict):
        above = (*above, (len(path), value.get("unknown") or {}))
        return {one for key, part in value.items() if key != "unknown" for one in unreasoned(part, (*path, key), above)}
    if isinstance(value, list):
        return {one for part in value for one in unreasoned(part, path, above)}
    told = any(".".join(path[depth:end]) in unknown for depth, unknown in above for end in range(depth + 1, len(path) + 1))
    return set() if value is not None or told else {".".join(path)} - NO_SUCH_THING
