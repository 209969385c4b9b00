"""Makes a Unix socket the stdin and stdout of a program, and becomes that program. A script of its own, which the
guardian of a process starts as `python -I -S bridge.py SOCKET PROGRAM [ARGUMENT...]`."""

import os
import socket
import sys

if __name__ == "__main__":
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    for stream in (0, 1):
        os.dup2(connection.fileno(), stream)
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")
