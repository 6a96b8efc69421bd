"""What the page of an analysis adds to the style sheet of the reports.

Blue shades mean that the device works, amber ones that it waits for a known cause, grey that it idles. Within a hue
lightness differs, so that they keep apart for every kind of colour vision and in grey print; tables repeat them.
"""

from __future__ import annotations

from saturate.report import style

#: Shades 6 to 9: input, sync, host late, already launched.
LIGHT = {"shade6": "#8a4600", "shade7": "#c77416", "shade8": "#e59f4d", "shade9": "#f3cd9c"}
DARK = {"shade6": "#ffd7a1", "shade7": "#efae5f", "shade8": "#c07a2c", "shade9": "#8f5a1c"}
#: Which text colour is readable on them.
ON_LIGHT = ("on-dark", "on-light", "on-light", "on-light")
ON_DARK = ("on-light", "on-light", "on-light", "on-dark")
FIRST = style.SHADES


def _variables(own: dict[str, str], on: tuple[str, ...], palette: dict[str, str]) -> str:
    texts = {f"on{FIRST + index}": palette[name] for index, name in enumerate(on)}
    return "".join(f"--{name}:{value};" for name, value in {**own, **texts}.items())


_RULES = """
.stacked .swatch{margin-left:0}
.bars li{margin-top:1.25rem}
.bars p{margin-bottom:.35rem}
.cards{margin-top:1.5rem;display:grid;gap:1.1rem;counter-reset:card}
.cards>li{background:var(--panel);border-left:3px solid var(--accent);padding:1rem 1.25rem 1.1rem}
.cards h3{margin:0 0 .35rem;display:flex;flex-wrap:wrap;gap:.1rem 1rem;justify-content:space-between;
align-items:baseline;font-size:1.0625rem}
.cards h3 b{color:var(--accent);font-weight:650;white-space:nowrap}
.cards table{margin-top:.75rem;font-size:.875rem}
.cards td{padding-top:.4rem;padding-bottom:.4rem}
.cards .helps{margin-top:.75rem}
.cards .id{font-size:.8125rem;color:var(--soft);margin-top:.5rem}
.roofline{height:22rem;width:100%;background:var(--panel)}
.roofline .grid{stroke:var(--rule)}
.roofline .roof{stroke:var(--ink);stroke-width:1.5}
.roofline .roof.slant{stroke-dasharray:6 3}
.roofline text{font-size:11px;fill:var(--ink)}
.roofline .name{paint-order:stroke;stroke:var(--panel);stroke-width:3}
.roofline circle{fill-opacity:.75;stroke:var(--panel);stroke-width:1}
.roofline .memory,.key .memory{fill:var(--accent)}
.roofline .compute,.key .compute{fill:var(--shade7)}
.roofline .latency,.key .latency{fill:var(--base)}
.roofline .number{text-anchor:middle;font-weight:650;paint-order:stroke;stroke:var(--panel);stroke-width:3}
.scatter{display:grid;grid-template-columns:2.6rem minmax(0,1fr);gap:0 .5rem;margin-top:1.5rem;font-size:.75rem;
color:var(--soft);line-height:1}
.scatter .axis{display:flex;flex-direction:column;justify-content:space-between;text-align:right}
.scatter .below{grid-column:2;display:flex;justify-content:space-between;padding-top:.4rem}
.scatter .what{grid-column:2;text-align:center;padding-top:.5rem}
.each{margin-top:1rem;display:inline-block;max-width:100%;min-width:min(20rem,100%)}
.each rect{stroke:var(--page);stroke-width:1}
.each svg{max-width:100%;height:7rem}
.each .below{display:flex;justify-content:space-between;font-size:.75rem;color:var(--soft);padding-top:.35rem}
.operators th{white-space:nowrap}
.ranked td:first-child{color:var(--soft)}
.defs dt{font-weight:650;color:var(--ink);font-size:.9375rem;margin-top:.9rem}
.defs dd{font-weight:400;line-height:1.55;max-width:46rem}
.problems li{padding:.7rem 1rem;background:var(--panel);border-left:3px solid var(--ink);margin-top:.6rem}
.fine{margin-top:1rem}
@media(max-width:44rem){
.roofline{height:18rem}
.cards>li{padding:.9rem 1rem}
.parts :is(th,td):nth-child(3){display:none}
}
"""


def sheet() -> str:
    """The whole style sheet of the page."""
    light, dark = _variables(LIGHT, ON_LIGHT, style.LIGHT), _variables(DARK, ON_DARK, style.DARK)
    shades = "".join(
        f".shade{shade}{{fill:var(--shade{shade});background:var(--shade{shade})}}.on{shade}{{fill:var(--on{shade})}}"
        for shade in range(FIRST, FIRST + len(LIGHT))
    )
    return (
        style.sheet()
        + f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        + shades
        + _RULES.replace("\n", "")
    )
