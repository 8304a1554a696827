"""Stand-ins for a host's processes, on the same contract: `python -m tests.host_part VERB RUN.yaml --folder F ...`.

Each counts its starts in F/VERB.starts. The authority serves F/run.yaml. A file F/VERB.dies makes it crash at once.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    parser.add_argument("run", type=Path)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--identity-path", type=Path)
    parser.add_argument("--host-maddrs", default="")
    for name in (
        "--keys",
        "--initial-peers",
        "--given-out",
        "--announce-maddrs",
        "--tls-cert",
        "--tls-key",
        "--database",
        "--host",
        "--push-to",
        "--checkpoint-every",
    ):
        parser.add_argument(name)
    for name in ("--behind-proxy", "--trackio", "--wandb"):
        parser.add_argument(name, action="store_true")
    options = parser.parse_args()
    folder = options.folder or options.identity_path.parent
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{options.verb}.starts").open("a") as file:
        file.write("x")
    if (folder / f"{options.verb}.dies").exists():
        print("The reason is in line 7.", file=sys.stderr, flush=True)
        return 3
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    print(json.dumps({"ready": serve(options, folder)}), flush=True)
    print(f"{options.verb} says something", flush=True)
    if (folder / f"{options.verb}.deaf").exists():
        threading.Event().wait()
    stop.wait()
    with (folder.parent / "ends").open("a") as file:
        file.write(options.verb + "\n")
    return 0


def identity() -> bytes:
    """A libp2p key file, made without hivemind, whose import takes longer than all else here."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    der = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    return b"\x08\x00\x12" + bytes([len(der) & 127 | 128, len(der) >> 7]) + der  # protobuf: type RSA, and its bytes


def serve(options: argparse.Namespace, folder: Path) -> dict:
    if options.verb == "first-peer":
        if not options.identity_path.exists():
            options.identity_path.write_bytes(identity())
        maddr = options.host_maddrs.split(",")[0].replace("0.0.0.0", "127.0.0.1")
        return {"peer_id": "QmPeer", "maddrs": [f"{maddr}/p2p/QmPeer"]}
    if options.verb == "monitor":
        return {"peer_id": "QmMonitor"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = options.run.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return {"url": f"http://127.0.0.1:{server.server_port}"}


if __name__ == "__main__":
    sys.exit(main())
