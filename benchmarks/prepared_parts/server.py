"""A Hub and an authority that are up and serve nobody: `python server.py CERTIFICATE KEY PORT=STATUS...`, over https by
IPv4 and IPv6. Each answer asks for two minutes of patience."""

from __future__ import annotations

import socket
import ssl
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class DualStack(ThreadingHTTPServer):
    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class Busy(BaseHTTPRequestHandler):
    status = 503

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Retry-After", "120")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    certificate, key, *ports = sys.argv[1:]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    for port, _, status in (one.partition("=") for one in ports):
        server = DualStack(("::", int(port)), type("Answers", (Busy,), {"status": int(status)}))
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever).start()
    print("ready", flush=True)


if __name__ == "__main__":
    main()
