"""Style sheet of the page: a phone, a desk, a printer; light and dark."""

from __future__ import annotations

from .style import DARK, LIGHT, css_variables

_LIGHT = (
    "--ink:#1b1f24;--soft:#57606a;--paper:#fff;--panel:#f4f6f8;--rule:#d0d7de;--note:#fff5d6;--edge:#b58900;"
    "--link:#0a58ca;--l0:28%;--l1:43%;" + css_variables(LIGHT)
)
_DARK = (
    "--ink:#e6e8eb;--soft:#a4adb8;--paper:#14171c;--panel:#1d2229;--rule:#39414b;--note:#332b12;--edge:#d9a900;"
    "--link:#7ab7ff;--l0:54%;--l1:72%;" + css_variables(DARK)
)

CSS = f"""
:root{{color-scheme:light dark;{_LIGHT}}}
@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:74rem;padding:1rem 1.25rem 3rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;overflow-wrap:break-word}}
h1{{font-size:1.7rem;line-height:1.2;margin:.6rem 0 .2rem}}
h2{{font-size:1.3rem;margin:2.2rem 0 .5rem;border-top:1px solid var(--rule);padding-top:1rem}}
h3{{font-size:1.08rem;margin:1.6rem 0 .4rem}}
p{{max-width:48rem;margin:.5rem 0}}
a{{color:var(--link)}}
.sub{{color:var(--soft)}}
.on-paper{{display:none}}
.finding{{font-size:1.12rem;border-left:4px solid var(--s0);padding:.1rem 0 .1rem .8rem;margin:1rem 0}}
.note{{background:var(--note);border-left:4px solid var(--edge);padding:.4rem .8rem;margin:.8rem 0;border-radius:3px}}
.note p,.note ul{{margin:.2rem 0}}
.scroll{{overflow-x:auto;margin:1rem 0;max-width:100%}}
.scroll:focus-visible{{outline:2px solid var(--link)}}
table{{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums;overflow-wrap:normal}}
caption{{text-align:left;font-weight:600;padding:.2rem 0 .4rem}}
th,td{{padding:.34rem .7rem;border-bottom:1px solid var(--rule);text-align:left;vertical-align:baseline}}
td{{white-space:nowrap}}
td.left{{white-space:normal;min-width:7rem}}
thead th{{border-bottom:2px solid var(--soft);vertical-align:bottom;font-weight:600}}
tbody th{{font-weight:500;min-width:9rem;max-width:16rem;overflow-wrap:break-word}}
.settings tbody th{{max-width:none;white-space:nowrap;position:static}}.settings td{{overflow-wrap:anywhere}}
tbody th,thead th:first-child{{position:sticky;left:0;background:var(--paper);z-index:1}}
.right{{text-align:right}}
.ablation tbody th,.ablation thead th:first-child{{position:static;min-width:0}}
.ablation tbody th:last-of-type,.ablation thead th:not(.right){{padding-right:1.6rem}}
.unit{{color:var(--soft);font-weight:400;white-space:nowrap}}
.figures{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,27rem),1fr));gap:1.4rem 2rem;
margin:1rem 0;align-items:start}}
.figures.small{{grid-template-columns:repeat(auto-fill,minmax(min(100%,16rem),1fr))}}
figure{{margin:0;min-width:0}}
figure svg{{display:block;width:100%;max-width:31rem;height:auto;overflow:visible;font-family:inherit}}
figcaption{{font-size:.86rem;color:var(--soft);margin-top:.3rem}}
figcaption b{{color:var(--ink);font-weight:600}}
.footnotes{{font-size:.86rem;display:grid;grid-template-columns:max-content 1fr;gap:.15rem .9rem;max-width:62rem}}
.footnotes dt{{font-weight:600}}
.footnotes dd{{margin:0;color:var(--soft)}}
details{{margin:.4rem 0;border:1px solid var(--rule);border-radius:4px;padding:.35rem .8rem;max-width:62rem}}
summary{{cursor:pointer;font-weight:600}}
pre{{background:var(--panel);padding:.6rem .8rem;border-radius:4px;font-size:.88rem;
white-space:pre-wrap}}
@media (max-width:34rem){{body{{padding:.6rem .8rem 2rem;font-size:15px}}
tbody th{{min-width:6.5rem;max-width:8.5rem}}th,td{{padding:.3rem .5rem}}
.figures.small{{grid-template-columns:1fr 1fr;gap:1rem}}
.footnotes{{grid-template-columns:1fr}}.footnotes dd{{margin-bottom:.35rem}}}}
@media print{{@page{{size:A4;margin:14mm}}
html{{font-size:9.5pt}}body{{max-width:none;padding:0;font-size:1rem}}
.scroll{{overflow:visible}}table{{font-size:7pt}}th,td{{padding:.18rem .32rem}}
tbody th{{min-width:0;max-width:none}}tbody th,thead th:first-child{{position:static}}
details:not([open]){{display:none}}.on-paper{{display:block}}summary{{list-style:none}}
.figures{{grid-template-columns:1fr 1fr;gap:1rem}}.figures.small{{grid-template-columns:repeat(3,1fr)}}
figure,tr,.scroll,.note,.finding,details{{break-inside:avoid}}h2,h3,caption{{break-after:avoid}}thead{{display:table-header-group}}
section.experiment+section.experiment{{break-before:page}}
pre{{border:1px solid var(--rule)}}}}
"""
