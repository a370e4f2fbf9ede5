"""The look of the report: screens of any width, light or dark, and paper.

Colours are Okabe and Ito's, darker or lighter where the background asks for it; every drafter has a shape
too, so nothing is told by colour alone.
"""

COLOURS = {  # drafter: on light, on dark
    "sequential": ("#0067a5", "#56b4e9"),
    "parallel": ("#c24e00", "#ff9a52"),
    "early_exit": ("#007a59", "#35cfa3"),
    "medusa": ("#9a4483", "#e79bcb"),
    "eagle": ("#7a6200", "#f0e442"),
    "hybrid": ("#5b3fb5", "#b9a5ff"),
    "layer_skip": ("#4f6b1f", "#b5d27a"),
}
GREY = ("#5a6475", "#a7b0c0")

PAPER = """--ink: #1d2430; --dim: #5b6576; --page: #ffffff; --line: #d8dde6; --soft: #f4f6f9;
  --grid: #e4e8ee; --mark: #d3f2db; --mark-ink: #0b5a2b; --no: #fbdada; --no-ink: #8f1d1d;
  --open: #fdf0cf; --open-ink: #6b4a00;"""
NIGHT = """--ink: #e5e9f0; --dim: #a2acbc; --page: #14181f; --line: #343c4a; --soft: #1b212a;
  --grid: #2a323f; --mark: #14442a; --mark-ink: #a9ecc3; --no: #4d1d1f; --no-ink: #f7b4b4;
  --open: #453409; --open-ink: #f5d98c;"""

CHARTS = """
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .dim, svg .tick { fill: var(--dim); }
svg .tick { font-size: 11px; }
svg .grid { stroke: var(--grid); fill: none; }
svg .axis { stroke: var(--dim); fill: none; }
svg .guide { stroke: var(--dim); stroke-dasharray: 4 4; fill: none; }
svg .s { stroke: var(--c); color: var(--c); fill: none; stroke-width: 2; }
svg .s .m { fill: var(--c); stroke: var(--page); stroke-width: 1; }
svg .s.hollow .m { fill: var(--page); stroke: var(--c); stroke-width: 1.8; }
svg .s .w { stroke-width: 1.3; opacity: .75; }
svg .s .bar { fill: var(--c); stroke: none; }
svg .s .bar.soft { opacity: .45; }
"""

PAGE = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 1rem 1rem 4rem; max-width: 76rem; color: var(--ink); background: var(--page);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .2rem 0 .4rem; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .4rem; border-top: 1px solid var(--line); padding-top: 1.2rem; }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .2rem; }
h4 { font-size: .9rem; margin: .6rem 0 0; }
p, ul { margin: .4rem 0; max-width: 48rem; }
ul { padding-left: 1.2rem; }
code { font-size: .9em; }
p.dim, span.dim, li.dim, figcaption { color: var(--dim); font-size: .9rem; }
.lead li { margin: .35rem 0; }
.findings { list-style: none; padding: 0; }
.findings > li { border-left: 3px solid var(--line); padding-left: .7rem; margin: .8rem 0; }
.findings ul { list-style: none; padding: 0; }
.chip { border-radius: .3rem; padding: .05rem .4rem; font-size: .85rem; background: var(--open);
  color: var(--open-ink); white-space: nowrap; }
.chip.yes { background: var(--mark); color: var(--mark-ink); }
.chip.against { background: var(--no); color: var(--no-ink); }
.choose { border: 1px solid var(--line); border-radius: .5rem; padding: .3rem .8rem .6rem; margin: 1.5rem 0 0;
  display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; }
.overview svg { max-width: 34rem; margin: .5rem 0; }
.key { font-weight: 600; }
.choose[hidden] { display: none; }
.choose label { display: inline-flex; gap: .4rem; align-items: center; min-height: 2rem; }
figure { margin: 0 0 1rem; break-inside: avoid; }
figcaption { max-width: 48rem; margin-top: .3rem; }
.row { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr));
  gap: .3rem 1.2rem; }
.row > * { min-width: 0; }
.row .row { display: block; }
svg { width: 100%; height: auto; display: block; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .4rem 0; font-size: .9rem; padding: 0;
  list-style: none; max-width: none; }
.legend svg { width: 34px; height: 14px; flex: none; }
.legend li { display: flex; align-items: center; gap: .35rem; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: .4rem; }
.wide:focus-visible { outline: 2px solid var(--ink); outline-offset: 2px; }
table { border-collapse: collapse; font-size: .85rem; width: 100%; }
th, td { padding: .3rem .55rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th { vertical-align: bottom; white-space: normal; font-weight: 600; background: var(--soft); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--page); }
th:first-child { background: var(--soft); }
td.text, th.text { text-align: left; }
td.command { white-space: normal; min-width: 20rem; overflow-wrap: anywhere; }
td .dim { font-size: .9em; }
tr:last-child > td { border-bottom: 0; }
th button { all: unset; cursor: pointer; font: inherit; }
th button:focus-visible { outline: 2px solid var(--ink); outline-offset: 2px; border-radius: 2px; }
th button::after { content: "\\2195"; color: var(--dim); margin-left: .2rem; font-weight: 400; }
th[aria-sort="ascending"] button::after { content: "\\2191"; color: var(--ink); }
th[aria-sort="descending"] button::after { content: "\\2193"; color: var(--ink); }
pre.text { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line);
  border-radius: .4rem; padding: .7rem; margin: .3rem 0 1rem; font: .85rem/1.6 ui-monospace, monospace;
  break-inside: avoid; }
.prompt { color: var(--dim); }
.accepted { background: var(--mark); color: var(--mark-ink); border-radius: .2rem;
  box-shadow: inset 0 -2px 0 var(--mark-ink); border-right: 1px solid var(--page); }
.next { border-radius: .2rem; }
summary { cursor: pointer; padding: .4rem 0; }
summary:focus-visible { outline: 2px solid var(--ink); }
.source { font-size: .85rem; overflow-wrap: anywhere; max-width: none; }
@media screen { .off { display: none; } }
@media (max-width: 30rem) { body { padding: .8rem .8rem 3rem; } h1 { font-size: 1.3rem; } }
@page { size: A4; margin: 14mm; }
@page table { size: A4 landscape; margin: 10mm; }
@media print {
  body { font-size: 10pt; max-width: none; padding: 0; }
  h2, h3, h4 { break-after: avoid; }
  .choose, th button::after { display: none; }
  .sheet { page: table; }
  .wide { overflow: visible; border: 0; }
  table { font-size: 6pt; }
  th, td { padding: .15rem .2rem; white-space: normal; }
  th:first-child, td:first-child { position: static; }
  td.command { min-width: 0; }
  .row { grid-template-columns: repeat(auto-fit, minmax(55mm, 1fr)); }
  .chip, .accepted { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def colours(place: int) -> str:
    """The rules that give every drafter its colour; place 0: on light, 1: on dark."""
    own = "".join(f".f-{name} {{ --c: {pair[place]}; }}" for name, pair in COLOURS.items())
    return f".s {{ --c: {GREY[place]}; }}{own}"


def theme() -> str:
    """Both palettes; the dark one where a reader's screen asks for it, and never on paper."""
    return (
        f":root {{ {PAPER} }}{colours(0)}"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {NIGHT} }}{colours(1)} }}"
    )


STYLE = ":root { color-scheme: light dark; }" + theme() + CHARTS + PAGE
FIGURE_STYLE = theme() + CHARTS
