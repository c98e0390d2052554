"""What a browser may do with the page, and who may ask for it.

The page shows what models wrote. It is put there as text, never as markup; should that ever fail,
the policy below still lets no script run but the page's own files, and sends nothing anywhere. Only
requests that name this machine as the host are answered, so that a web page elsewhere cannot reach
the viewer through a name of its own (DNS rebinding).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from ipaddress import ip_address

from aiohttp import web
from yarl import URL

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = (
    ("Content-Security-Policy", CONTENT_SECURITY_POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),
)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own, by its form alone."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@web.middleware
async def only_this_machine(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse requests under a foreign host name; put the headers on every answer."""
    if not _names_this_machine(request.headers.get("Host", "")):
        response: web.StreamResponse = web.Response(status=403, text="unknown host")
    elif request.method not in ("GET", "HEAD"):
        response = web.Response(status=405, text="the viewer only reads")
    else:
        try:
            response = await handler(request)
        except web.HTTPException as error:
            error.headers.update(HEADERS)
            raise
    response.headers.update(HEADERS)
    return response


def _names_this_machine(header: str) -> bool:
    try:
        return is_loopback(URL(f"http://{header}").host or "")
    except ValueError:
        return False
