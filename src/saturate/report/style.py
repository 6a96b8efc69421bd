"""The palette and the style sheet of the HTML report.

One accent colour means "with saturate", neutral ink means "as it was". Text pairs reach WCAG AA (4.5 to 1), lines and
bars 3 to 1, in both themes; the tests compute it. The shades of a split are one ramp of lightness, so they keep their
order for every kind of colour vision and in grey print; the palest have less contrast, and a table repeats them.
"""

from __future__ import annotations

LIGHT = {
    "page": "#fcfcfd",
    "panel": "#f3f4f7",
    "rule": "#dcdee6",
    "ink": "#14161d",
    "soft": "#565b6b",
    "accent": "#3340c4",
    "base": "#7d8294",
    "band": "#d9dcf5",
    "whisker": "#14161d",
    "shade0": "#1f2a8f",
    "shade1": "#4553d6",
    "shade2": "#7482e8",
    "shade3": "#a3adf1",
    "shade4": "#c9cff7",
    "shade5": "#b4b8c4",
    "on-dark": "#ffffff",
    "on-light": "#14161d",
}
DARK = {
    "page": "#101218",
    "panel": "#191c25",
    "rule": "#313644",
    "ink": "#eceef4",
    "soft": "#a3a9ba",
    "accent": "#a4b0ff",
    "base": "#858b9e",
    "band": "#2b3160",
    "whisker": "#eceef4",
    "shade0": "#dfe3ff",
    "shade1": "#b3bdff",
    "shade2": "#8996f5",
    "shade3": "#5c68cc",
    "shade4": "#47529f",
    "shade5": "#565c6d",
    "on-dark": "#ffffff",
    "on-light": "#101218",
}
#: Which text colour is readable on which shade.
ON_LIGHT = ("on-dark", "on-dark", "on-light", "on-light", "on-light", "on-light")
ON_DARK = ("on-light", "on-light", "on-light", "on-dark", "on-dark", "on-dark")
SHADES = len(ON_LIGHT)


def _variables(palette: dict[str, str], on: tuple[str, ...]) -> str:
    texts = {f"on{shade}": palette[name] for shade, name in enumerate(on)}
    return "".join(f"--{name}:{value};" for name, value in {**palette, **texts}.items())


def _shades() -> str:
    return "".join(
        f".shade{i}{{fill:var(--shade{i});background:var(--shade{i})}}.on{i}{{fill:var(--on{i})}}"
        for i in range(SHADES)
    )


#: A table whose rows are labelled blocks, where a screen is too narrow for its columns.
_STACKED = """
.stacked,.stacked :is(thead,tbody,tfoot,tr,td){display:block}
.stacked thead{position:absolute;left:-99rem}
.stacked tr{padding:.8rem 0;border-bottom:1px solid var(--rule)}
.stacked td{padding:.12rem 0;border:0;text-align:left;white-space:normal;display:grid;
grid-template-columns:7.5rem minmax(0,1fr);column-gap:.5rem}
.stacked td::before{content:attr(data-label);color:var(--soft);font-size:.8125rem;line-height:1.75}
.stacked td:first-child{display:block}
.stacked td:first-child::before,.stacked td:empty{display:none}
.stacked tbody tr:last-child{border-bottom:0}
.stacked tfoot tr{border-top:2px solid var(--ink);border-bottom:0}
"""
#: Up to which width: of most tables, and of those with `many` columns.
_NARROW, _MIDDLING = "44rem", "62rem"

_RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
@media(prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.6 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
main,header,footer{max-width:60rem;margin:0 auto;padding:0 1.5rem}
h1,h2,h3,p,ul,ol,dl,dd,figure{margin:0;padding:0}
ul,ol{list-style:none}
code,pre{font:.875em/1.6 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
a{color:var(--accent)}
:focus-visible{outline:2px solid var(--accent);outline-offset:3px;border-radius:2px}
.skip{position:absolute;left:-99rem}
.skip:focus{left:1rem;top:1rem;background:var(--page);padding:.5rem 1rem}
.num{text-align:right;white-space:nowrap}
:is(.num,.value,dd,th){overflow-wrap:break-word}
.soft{color:var(--soft)}
.small{font-size:.875rem}
.nowrap{white-space:nowrap}

header{padding-top:3.5rem;padding-bottom:2.5rem}
.brand{font-size:.875rem;color:var(--soft);margin-bottom:2.5rem}
.brand b{color:var(--ink);font-weight:650;letter-spacing:-.01em}
h1{font-size:clamp(2.25rem,7vw,4rem);line-height:1.05;font-weight:700;letter-spacing:-.035em;text-wrap:balance}
.win h1,.fits h1{color:var(--accent)}
.lede{font-size:1.125rem;margin-top:.9rem;max-width:46rem}
.lede .status{font-weight:650}
.change{margin-top:2rem;max-width:46rem}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:1.25rem 2rem;margin-top:2.25rem;
padding-top:1.25rem;border-top:1px solid var(--rule)}
dt{font-size:.8125rem;color:var(--soft)}
dd{font-weight:600;line-height:1.4}
.plain dd{font-weight:400}
.notes{margin-top:1.5rem;padding:.9rem 1.1rem;background:var(--panel);border-left:3px solid var(--ink)}
.notes li+li{margin-top:.4rem}

nav{border-block:1px solid var(--rule)}
nav ul{max-width:60rem;margin:0 auto;padding:.7rem 1.5rem;display:flex;flex-wrap:wrap;gap:.2rem 1.5rem;
font-size:.875rem}
nav a{color:var(--soft);text-decoration:none;display:inline-block;padding:.15rem 0}
nav a:hover{color:var(--ink);text-decoration:underline}

section{padding:3.25rem 0 0}
h2{font-size:1.5rem;line-height:1.25;font-weight:680;letter-spacing:-.02em}
h2+p{margin-top:.4rem;color:var(--soft);max-width:44rem}
h3{font-size:1rem;font-weight:650;margin:2rem 0 .6rem}
.rows{margin-top:1.5rem;display:grid;gap:.55rem}
.rows>li{display:grid;grid-template-columns:14rem minmax(0,1fr) 12.5rem;gap:.1rem 1.1rem;align-items:center}
.rows .value{text-align:right}
.change .rows>li{grid-template-columns:5rem minmax(0,1fr) 8rem}
.short.rows>li{grid-template-columns:11rem minmax(0,1fr) 7rem}
.two.rows>li{grid-template-columns:4rem minmax(0,1fr) 8rem}

.scroll{overflow-x:auto}
.compact td{overflow-wrap:break-word}
td>div:has(>.swatch){display:flex;align-items:baseline}
table{width:100%;border-collapse:collapse;margin-top:1.25rem;font-size:.9375rem}
th{font-size:.8125rem;font-weight:500;color:var(--soft);text-align:left;vertical-align:bottom;
padding:.4rem 1rem .4rem 0;border-bottom:1px solid var(--rule)}
th.num{text-align:right;white-space:nowrap}
:is(.num,.value,dd,th){overflow-wrap:break-word}
th.short,td.short{white-space:nowrap}
td{padding:.7rem 1rem .7rem 0;border-bottom:1px solid var(--rule);vertical-align:top}
th:last-child,td:last-child{padding-right:0}
tfoot td{font-weight:650;border-bottom:0;border-top:2px solid var(--ink)}
tbody tr:last-child td{border-bottom:0}
td b{font-weight:650}
td .sub{display:block;color:var(--soft);font-size:.875rem}
td.num .sub{white-space:nowrap}
.swatch{display:inline-block;width:.8em;height:.8em;margin-right:.6em;border-radius:2px;flex:none}
.fate{white-space:nowrap}
.sign{width:1em;height:1em;vertical-align:-.14em;margin-right:.45em;fill:none;stroke:currentColor;stroke-width:1.6;
stroke-linecap:round;stroke-linejoin:round}
.sign.strong{stroke-width:2.4}
.win .status .sign,.fits .status .sign,.keep .sign{color:var(--accent)}

h3+table,h3+.scroll>table{margin-top:0}
.causes th:nth-child(1){width:30%}
.outcomes{table-layout:fixed}
.outcomes th:nth-child(1){width:24%}
.outcomes th:nth-child(3){width:12%}
.outcomes th:nth-child(4){width:17%}
.outcomes th:nth-child(5){width:18%}

details{margin-top:1.25rem;border-top:1px solid var(--rule)}
details+details{margin-top:0}
summary{cursor:pointer;padding:.75rem 0;font-weight:600}
summary:hover{color:var(--accent)}
details>:last-child{margin-bottom:1rem}
details>table:first-of-type{margin-top:0}

svg{display:block;overflow:visible}
svg.sign{display:inline-block}
.stack svg{overflow:hidden}
.stack rect{stroke:var(--page);stroke-width:2}
.stack text{font-size:12px}
.bar .base{fill:var(--base)}
.bar .tuned{fill:var(--accent)}
.bar .time{fill:var(--shade3)}
.reference{stroke:var(--ink);stroke-dasharray:2 3;opacity:.55}
.whisker{stroke:var(--whisker);stroke-width:1.5}
.halo{stroke:var(--page);stroke-width:4.5}
.band{fill:var(--band)}
.zero{stroke:var(--soft)}
.tick{stroke:var(--rule)}
.dots{min-width:9rem}
.dot{fill:var(--accent);fill-opacity:.8}
.dot.open{fill:var(--page);stroke:var(--accent);stroke-width:1.2}

.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(16rem,100%),1fr));gap:2rem 2.25rem;
margin-top:1.5rem}
figcaption{font-size:.875rem;line-height:1.45}
figcaption b{font-weight:650}
.canvas{display:grid;grid-template-columns:4rem minmax(0,1fr);gap:0 .5rem;margin-top:.6rem;font-size:.75rem;
color:var(--soft);line-height:1}
.canvas .axis{white-space:nowrap;display:flex;flex-direction:column;justify-content:space-between;text-align:right}
.canvas .below{grid-column:2;display:flex;justify-content:space-between;padding-top:.4rem}
.plot{width:100%;height:8.5rem;background:var(--panel);overflow:hidden}
.plot.strip{height:3.5rem}
.plot path{fill:none;vector-effect:non-scaling-stroke}
.plot path.band{fill:var(--band)}
.plot .base{stroke:var(--ink);stroke-width:1.25;stroke-dasharray:4 3}
.plot .cand{stroke:var(--accent);stroke-width:2}
.key{display:flex;flex-wrap:wrap;gap:.25rem 1.5rem;margin-top:1rem;font-size:.875rem;color:var(--soft)}
.key svg{display:inline-block;width:28px;height:10px;margin-right:.5rem;vertical-align:middle}
.key path{fill:none}
.key .band{fill:var(--band)}
.key .base{stroke:var(--ink);stroke-width:1.25;stroke-dasharray:4 3}
.key .cand{stroke:var(--accent);stroke-width:2}

pre{margin:.5rem 0 0;padding:.8rem 1rem;background:var(--panel);white-space:pre-wrap;border-radius:3px}
.steps{margin-top:1.25rem}
.steps>li+li{margin-top:1.25rem}
footer{padding:3rem 1.5rem 4rem;font-size:.8125rem;color:var(--soft)}

@media(max-width:44rem){
main,header{padding-left:1.1rem;padding-right:1.1rem}
nav ul{padding-left:1.1rem;padding-right:1.1rem}
header{padding-top:1.75rem}
.brand{margin-bottom:1.5rem}
.rows>li,.change .rows>li,.short.rows>li,.two.rows>li{grid-template-columns:minmax(0,1fr) auto}
.rows>li>svg{grid-column:1/-1;grid-row:2}
.rows{gap:1rem}
.bar{overflow:hidden}
.compact{font-size:.875rem}
.compact td,.compact th{padding-right:.5rem}
.compact th{white-space:normal}
}

@media print{
body{font-size:10.5pt}
nav,.skip{display:none}
header{padding-top:0}
section{padding-top:1.75rem}
details::details-content{content-visibility:visible;block-size:auto}
summary{list-style:none}
tr,figure,.rows>li{break-inside:avoid}
h2,h3,summary{break-after:avoid}
svg,.swatch{print-color-adjust:exact;-webkit-print-color-adjust:exact}
}
"""


def sheet() -> str:
    """The whole style sheet. Paper gets the light palette whatever the screen had."""
    light, dark = _variables(LIGHT, ON_LIGHT), _variables(DARK, ON_DARK)
    return (
        f":root{{color-scheme:light dark;{light}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}" + _shades() + _RULES.replace("\n", "")
        + _stacking(_NARROW, ".stacked") + _stacking(_MIDDLING, ".stacked.many")
    )


def _stacking(width: str, tables: str) -> str:
    return f"@media(max-width:{width}){{{_STACKED.replace('.stacked', tables)}}}".replace("\n", "")
