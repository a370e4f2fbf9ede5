"""The look of a trace page, on screens of any width, light or dark."""

STYLE = """
:root { --ink: #1d2430; --dim: #667085; --page: #ffffff; --line: #d8dde6;
  --green: #d3f2db; --green-ink: #0b5a2b; --red: #fbdada; --red-ink: #8f1d1d; --blue: #d9e6fd;
  --blue-ink: #17429b; --grey: #eef0f4; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e5e9f0; --dim: #9aa4b5; --page: #14181f; --line: #343c4a; --green: #14442a; --green-ink: #a9ecc3;
  --red: #4d1d1f; --red-ink: #f7b4b4; --blue: #1b3566; --blue-ink: #bcd3ff; --grey: #262d38; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem 1rem 6rem; max-width: 60rem; color: var(--ink); background: var(--page);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 0; border-top: 1px solid var(--line); padding-top: 1rem; }
p { margin: .3rem 0; }
.legend { line-height: 2; }
.legend .t { white-space: nowrap; }
.facts, .note, figcaption { color: var(--dim); font-size: .9rem; }
.t { font-family: ui-monospace, monospace; font-size: .85rem; border-radius: .25rem; padding: .1rem .2rem;
  margin: .1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; background: none; border: 1px solid var(--line);
  border-radius: .5rem; padding: .7rem; line-height: 1.6; font: .85rem/1.6 ui-monospace, monospace; }
.text .t { padding: 0; margin: 0; border-radius: .15rem; font-size: inherit; }
.prompt { color: var(--dim); }
.accepted { background: var(--green); color: var(--green-ink); }
.rejected { background: var(--red); color: var(--red-ink); text-decoration: line-through 1px; }
.unreached { background: var(--grey); color: var(--dim); }
.cut { background: var(--grey); color: var(--dim); text-decoration: line-through 1px; }
.supplied { background: var(--blue); color: var(--blue-ink); }
.steps { padding-left: 2.6rem; font-size: .9rem; color: var(--dim); }
.steps > li { padding: .15rem 0; line-height: 1.8; }
.count { display: inline-block; min-width: 1.6rem; font-weight: 600; color: var(--ink); }
.arrow { margin: 0 .2rem; }
.tree { list-style: none; margin: 0; padding: 0 0 0 .3rem; border-left: 1px solid var(--line); }
.tree li { display: flex; align-items: flex-start; }
.tree .t { flex: none; }
.steps > li > .tree { overflow-x: auto; border: none; }
figure { margin: 1rem 0; }
svg { display: block; width: 100%; height: 7rem; background: var(--grey); border-radius: .25rem; }
rect { fill: var(--green-ink); opacity: .35; }
polyline { fill: none; stroke: var(--blue-ink); stroke-width: 2; vector-effect: non-scaling-stroke; }
[data-tip] { cursor: default; outline-offset: 1px; }
[data-tip]:hover, [data-tip]:focus { outline: 2px solid var(--ink); }
[data-tip]:hover::after, [data-tip]:focus::after { content: attr(data-tip); position: fixed;
  inset: auto 0 0 0; z-index: 1; padding: .7rem 1rem; background: var(--ink); color: var(--page);
  white-space: pre-wrap; font: .9rem/1.4 ui-monospace, monospace; }
"""
