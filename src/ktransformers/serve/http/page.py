"""The page at `/` as one document: page_files/page.html with its scripts, and the policy that goes with it.

An answer is untrusted text. The scripts never parse one as HTML; the policy is the second barrier: the browser runs
this script alone, by its hash, and loads nothing from another host.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent / "page_files"
SCRIPTS = ("markdown.js", "charts.js", "api.js", "chat.js", "training.js", "server.js", "start.js")


@functools.cache
def page_script() -> str:
    return "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)


@functools.cache
def page_document() -> str:
    return (FOLDER / "page.html").read_text(encoding="utf-8").replace("<script>SCRIPTS<", f"<script>{page_script()}<")


@functools.cache
def page_headers() -> dict[str, str]:
    digest = base64.b64encode(hashlib.sha256(page_script().encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
