"""The tool of the fake backend: `MODEL TARGET TYPE` (fakes.py says what the types do)."""

import signal
import sys
from pathlib import Path


def main() -> None:
    model, target, kind = sys.argv[1:]
    data = Path(model).read_bytes()
    if kind == "Q3_K_S":
        sys.exit("tensor blk.0.weight makes no sense")
    with open(target, "wb") as file:
        file.write(data[: len(data) // 2])
        file.flush()
        print("blk.0.weight", flush=True)
        while kind == "Q2_K":
            signal.pause()
        file.write(data[len(data) // 2 : -1] + bytes([data[-1] ^ 1]))


if __name__ == "__main__":
    main()
