"""The style sheet, the scripts and the content security policy of the monitor's pages."""

from __future__ import annotations

import base64
import hashlib

_LIGHT = ("--bg:#fff;--fg:#1c2430;--dim:#5c6773;--line:#d9dee5;--card:#f6f8fa;--idle:#c9d1da;--bad:#b42318;"
          "--ok:#1a7f37;--warn:#9a6700;--c0:#0969da;--c1:#bc4c00;--c2:#1a7f37;--c3:#8250df;--c4:#bf3989;--c5:#0b7285;"
          "--c6:#9a6700;--c7:#57606a;color-scheme:light")
_DARK = ("--bg:#0f141a;--fg:#dbe2ea;--dim:#8d99a6;--line:#2b3440;--card:#171e26;--idle:#3a4552;--bad:#ff7b72;"
         "--ok:#56d364;--warn:#e3b341;--c0:#58a6ff;--c1:#f0883e;--c2:#56d364;--c3:#bc8cff;--c4:#f778ba;--c5:#39c5cf;"
         "--c6:#e3b341;--c7:#8b949e;color-scheme:dark")

STYLE = f"""
:root{{{_LIGHT}}}
@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{_DARK}}}}}
:root[data-theme=dark]{{{_DARK}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:1200px;padding:1rem 1.25rem 4rem;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,sans-serif}}
header{{display:flex;gap:1rem;align-items:baseline;justify-content:space-between}}
h1{{font-size:1.5rem;margin:.5rem 0}}h2{{font-size:1.15rem;margin:2rem 0 .5rem;border-bottom:1px solid var(--line)}}
h3{{font-size:1rem;margin:1rem 0 .35rem}}a{{color:var(--c0)}}
button{{background:var(--card);color:var(--fg);border:1px solid var(--line);border-radius:6px;padding:.25rem .7rem;
cursor:pointer}}
.grid2{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr));gap:1rem}}
.grid2+.grid2{{margin-top:1rem}}body:has(.wide){{max-width:1500px}}
.card{{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.75rem 1rem;min-width:0}}
.card h3{{margin-top:0}}.chart{{width:100%;height:auto;display:block}}.spark{{width:120px;height:24px;display:block}}
svg text{{fill:var(--dim);font-size:11px}}svg .grid{{stroke:var(--line)}}
svg .curve{{fill:none;stroke-width:1.8;stroke-linejoin:round}}
.scroll{{overflow-x:auto}}table{{border-collapse:collapse;font-variant-numeric:tabular-nums}}
th,td{{text-align:left;padding:.2rem .9rem .2rem 0;border-bottom:1px solid var(--line);vertical-align:top;
overflow-wrap:anywhere}}
th{{color:var(--dim);font-weight:500;white-space:nowrap}}td.n,th.n{{text-align:right;white-space:nowrap}}
td.k,.rows td{{white-space:nowrap}}.wide table{{width:100%}}
.bars{{display:grid;grid-template-columns:max-content 1fr max-content;gap:.2rem .7rem;align-items:center}}
.track{{background:var(--line);height:.8rem;border-radius:3px;overflow:hidden}}
.bar{{display:block;height:100%;background:var(--c0)}}.figure,.dim,.none{{color:var(--dim)}}
.stack{{display:flex;height:1.1rem;border-radius:3px;overflow:hidden;background:var(--line)}}
.legend,.keys{{display:flex;flex-wrap:wrap;gap:.1rem .9rem;font-size:.87rem}}.level{{margin-bottom:.7rem}}
.key i{{display:inline-block;width:.7rem;height:.7rem;border-radius:2px;margin-right:.3rem}}
.running{{color:var(--ok)}}.silent{{color:var(--bad)}}.starting{{color:var(--warn)}}.ended{{color:var(--c0)}}
.flow{{display:flex;flex-wrap:wrap;align-items:center;gap:.4rem}}
.node{{border:1px solid var(--c0);border-radius:6px;padding:.35rem .7rem;text-align:center;background:var(--bg)}}
.edge{{text-align:center;color:var(--dim);font-size:.85rem;line-height:1.25}}
details{{margin:.5rem 0}}summary{{cursor:pointer}}video,img{{max-width:100%}}
@media (max-width:1000px){{svg text{{font-size:15px}}}}@media (max-width:520px){{svg text{{font-size:17px}}}}
"""

# The button switches between the light and the dark style, and the choice lasts until the page is closed. Until the
# button is clicked, or if scripts are disabled, the system's setting determines the style.
TOGGLE = """
document.getElementById("theme").addEventListener("click",function(){
var root=document.documentElement,set=root.dataset.theme;
var dark=set?set==="dark":matchMedia("(prefers-color-scheme:dark)").matches;
root.dataset.theme=dark?"light":"dark";});
"""

# Every two seconds, the script replaces the table with a new table from the server. The server has escaped all texts in
# the table, so it is safe to assign them to `innerHTML`.
REFRESH = """
setInterval(function(){if(document.hidden)return;
fetch("/rows").then(function(answer){return answer.ok?answer.text():Promise.reject();}).then(function(text){
document.getElementById("rows").innerHTML=text;document.getElementById("note").textContent="";
}).catch(function(){document.getElementById("note").textContent="the board has stopped";});},2000);
"""


def policy(script: str) -> str:
    """Return a content security policy that protects a page of the monitor.

    The page may only run the JavaScript code `script`, use inline styles, show embedded images and media, and send
    requests to its own server.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
            "media-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'")
