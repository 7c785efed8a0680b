"""What ssh is between real hosts: `python -m tests.lan.remote` runs commands on emulated ones.

serve: on a host; client HOST WORD...: the command there, with this process's standard input, its
standard error and its exit code. The end of the client is the end of the command's input.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading

PORT = 2222


def serve() -> None:
    server = socket.create_server(("", PORT))
    print("up", flush=True)
    while True:
        sock, _ = server.accept()
        threading.Thread(target=_run, args=(sock,), daemon=True).start()


def _run(sock: socket.socket) -> None:
    lines = sock.makefile("rb")
    words = json.loads(lines.readline())
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stderr is not None
    stdin = process.stdin

    def feed() -> None:
        with stdin:
            while data := os.read(sock.fileno(), 4096) if not lines.peek() else lines.read1(4096):
                stdin.write(data)
                stdin.flush()

    threading.Thread(target=feed, daemon=True).start()
    said = process.stderr.read()
    answer = json.dumps([process.wait(), said.decode(errors="replace")])
    sock.sendall(answer.encode() + b"\n")
    sock.close()


def client(host: str, words: list[str]) -> int:
    with socket.create_connection((host.rpartition("@")[2], PORT)) as sock:
        sock.sendall(json.dumps(words).encode() + b"\n")

        def feed() -> None:
            while data := os.read(0, 4096):
                sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)

        threading.Thread(target=feed, daemon=True).start()
        code, said = json.loads(sock.makefile("rb").readline() or b'[255, "connection lost"]')
        sys.stderr.write(said)
        return int(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    sys.exit(client(sys.argv[2], sys.argv[3:]))
