"""An engine without a model: a real process with llama-server's manners (health 503 while loading, the model field
ignored, SSE streams), and a knob for each way in which an engine can go wrong. Standard library only; up in 60 ms.

Completions answer `--tokens` words ("w0 w1 ..."), or as many as `max_tokens` asks for. Every request is noted as a JSON
line in `--record`, and so is every client that left before its answer was complete.
"""

import argparse
import json
import os
import re
import select
import signal
import socket
import sys
import threading
import time


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    p.add_argument("--socket", help="listen on this Unix socket")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int)
    p.add_argument("--model", default="fake")
    p.add_argument("--record", help="file that takes one JSON line for each request")
    starting = p.add_argument_group("starting")
    starting.add_argument("--gate", help="not ready before this file exists")
    starting.add_argument("--gate-before-listening", action="store_true", help="nor listening before")
    starting.add_argument("--never-ready", action="store_true")
    starting.add_argument("--ready-after", type=float, default=0.0, metavar="SECONDS")
    starting.add_argument("--spin", action="store_true", help="work hard until ready")
    starting.add_argument("--log-every", type=float, metavar="SECONDS", help="a line of progress until ready")
    starting.add_argument("--crash", metavar="MESSAGE", help="print it and exit with 1")
    starting.add_argument("--crash-while", metavar="FILE", help="... only while this file exists")
    starting.add_argument("--allocate", type=int, default=0, metavar="MIB")
    starting.add_argument("--sharing", type=int, default=0, help="so many children that share its memory")
    process = p.add_argument_group("process")
    process.add_argument("--ignore-term", action="store_true")
    process.add_argument("--stop", action="store_true", help="SIGSTOP itself once ready")
    process.add_argument("--grandchild", action="append", default=[], choices=["plain", "setsid", "double-fork"])
    process.add_argument("--forking", action="store_true", help="workers that hold its listening socket, all the time")
    process.add_argument("--flood", type=int, default=0, metavar="BYTES", help="of log lines before it is ready")
    process.add_argument("--flood-forever", action="store_true")
    process.add_argument("--long-line", type=int, default=0, metavar="BYTES")
    process.add_argument("--access-log", action="store_true")
    answering = p.add_argument_group("answering")
    answering.add_argument("--tokens", type=int, default=8)
    answering.add_argument("--clock", action="store_true", help="each word is the time, as time.monotonic_ns()")
    answering.add_argument("--text", default="", help="the answer, instead of --tokens words")
    answering.add_argument("--reasoning", default="", metavar="TEXT", help="a thought before a streamed answer")
    answering.add_argument("--tool", default="", metavar="NAME", help="a call of this tool after a streamed answer")
    answering.add_argument(
        "--round",
        action="append",
        default=[],
        metavar="JSON",
        help='calls of tools in an answer: [["NAME", {...}], ...]',
    )
    answering.add_argument("--most-tokens", type=int, default=1 << 30)
    answering.add_argument("--rate", type=float, default=0.0, metavar="TOKENS/S", help="0: as fast as it can")
    answering.add_argument("--timings", type=float, default=0.0, metavar="TOKENS/S", help="what a stream tells")
    answering.add_argument("--first-token-after", type=float, default=0.0, metavar="SECONDS")
    answering.add_argument("--token-gate", metavar="FILE", help="no second token before this file exists")
    answering.add_argument("--die", metavar="WHEN", help="before-headers, after-headers, or the number of a token")
    answering.add_argument("--hang", metavar="WHEN", help="as --die, but it stops (SIGSTOP)")
    answering.add_argument("--quote", action="store_true", help="log the body of the request as the reason of --die")
    answering.add_argument("--drop", metavar="WHEN", help="as --die, but only the connection")
    answering.add_argument(
        "--only-for",
        default="",
        metavar="TEXT",
        help="--die, --drop, --hang, --status, --first-token-after: if the body has it",
    )
    answering.add_argument(
        "--hold", metavar="FILE", help="works on each request until this file exists, also for nobody"
    )
    answering.add_argument("--status", type=int, default=0, help="answer with this error")
    answering.add_argument("--drafts", type=int, nargs=2, default=(), metavar="N", help="proposed and accepted tokens")
    answering.add_argument("--garbage", action="store_true", help="answer with what is not HTTP")
    return p.parse_args()


class Gone(Exception):
    """The client left."""


class Engine:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ready = threading.Event()
        self.words = re.findall(r"\S+\s*|\s+", options.text)
        self.ballast = bytearray(b"x") * (options.allocate << 20)

    def record(self, **event: object) -> None:
        if self.options.record:
            with open(self.options.record, "ab", buffering=0) as file:  # one write: events do not mix
                file.write(json.dumps(event).encode() + b"\n")

    def run(self) -> None:
        o = self.options
        if o.ignore_term:
            signal.signal(signal.SIGTERM, lambda *_: log("TERM is ignored"))
        if o.crash and (o.crash_while is None or os.path.exists(o.crash_while)):
            sys.exit(o.crash)
        for kind in o.grandchild:
            spawn_grandchild(kind)
        engine = os.getpid()
        for _ in range(o.sharing):
            if os.fork() == 0:
                while os.getppid() == engine:
                    time.sleep(0.05)
                os._exit(0)
        if o.gate_before_listening:
            self.load()
        listener = self.listen()
        if o.forking:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            threading.Thread(target=fork_workers, daemon=True).start()
        threading.Thread(target=self.accept, args=[listener], daemon=True).start()
        if not o.gate_before_listening:
            self.load()
        self.ready.set()
        log("ready")
        if o.stop:
            os.kill(os.getpid(), signal.SIGSTOP)
        while o.flood_forever:
            log("flood " * 20)
        threading.Event().wait()

    def load(self) -> None:
        """Waits until the gate opens, with the noise that the knobs ask for."""
        o = self.options
        log("loading model")
        if o.long_line:
            log("x" * o.long_line)
        for number in range(o.flood // 100):
            log(f"line {number} ".ljust(99, "."))
        opens, next_line = time.monotonic() + o.ready_after, 0.0
        while o.never_ready or time.monotonic() < opens or (o.gate and not os.path.exists(o.gate)):
            if o.log_every and time.monotonic() >= next_line:
                log("loading weights")
                next_line = time.monotonic() + o.log_every
            if not o.spin:
                time.sleep(0.002)

    def listen(self) -> socket.socket:
        o = self.options
        if o.socket:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(o.socket)
        else:
            listener = socket.socket(socket.AF_INET6 if ":" in o.host else socket.AF_INET)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((o.host, o.port))
        listener.listen(128)
        return listener

    def accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self.serve, args=[connection], daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        """Serves the requests of one connection, one after another, until the client closes it."""
        with connection, connection.makefile("rb") as stream:
            try:
                while (request := read_request(stream)) is not None:
                    Exchange(self, connection, *request).answer()
            except (Gone, OSError):
                pass
            except ValueError as error:
                self.record(malformed=str(error))
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def fork_workers() -> None:
    """One each five milliseconds, for as long as three of them."""
    while True:
        if os.fork() == 0:
            time.sleep(0.015)
            os._exit(0)
        time.sleep(0.005)


def spawn_grandchild(kind: str) -> None:
    """Starts a process that holds our stdout, ignores TERM, and lives for an hour; logs its process ID."""
    if os.fork() == 0:
        if kind != "plain":
            os.setsid()
        if kind == "double-fork" and os.fork():
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        log(f"grandchild {os.getpid()}")
        time.sleep(3600)
        os._exit(0)


def read_request(stream) -> tuple[str, str, dict[str, str], bytes] | None:
    """Method, path, headers in lower case, body; None at the end of the stream. Strict: ValueError for anything odd."""
    line = stream.readline(65537)
    if not line:
        return None
    method, path, version = line.decode("ascii").removesuffix("\r\n").split(" ")
    if not line.endswith(b"\r\n") or version != "HTTP/1.1" or not path.startswith("/"):
        raise ValueError(f"request line {line!r}")
    headers: dict[str, str] = {}
    while (line := stream.readline(65537)) != b"\r\n":
        name, colon, value = line.decode("latin-1").partition(":")
        if not line.endswith(b"\r\n") or not colon or name != name.strip() or name.lower() in headers:
            raise ValueError(f"header {line!r}")
        headers[name.lower()] = value.strip()
    if "transfer-encoding" in headers:
        raise ValueError("a chunked request; the proxy sends whole bodies")
    length = headers.get("content-length", "0")
    if not length.isdecimal():
        raise ValueError(f"length {length!r}")
    return method, path, headers, stream.read(int(length))


class Exchange:
    """One request and its answer."""

    def __init__(
        self, engine: Engine, connection: socket.socket, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> None:
        self.engine = engine
        self.options = engine.options
        self.connection = connection
        self.method, self.path, self.headers, self.body = method, path, headers, body
        self.faulty = self.options.only_for in body.decode(errors="replace")

    def answer(self) -> None:
        if self.options.access_log:
            log(f"request: {self.method} {self.path}")
        if self.path == "/health":
            up = self.engine.ready.is_set()
            return self.send(200 if up else 503, {"status": "ok" if up else "loading model"})
        if self.path == "/metrics":
            text = b'# TYPE fake_batches counter\nfake_batches_total{kind="any"} 3\n'
            for name, count in zip(("draft", "accepted"), self.options.drafts, strict=False):
                text += b"llamacpp:spec_decode_num_%b_tokens_total %d\n" % (name.encode(), count)
            head = self.head(200, "text/plain", f"Content-Length: {len(text)}")
            return self.connection.sendall(head + text)
        self.engine.record(method=self.method, path=self.path, headers=self.headers, body=self.body.decode("latin-1"))
        if self.options.garbage:
            return self.connection.sendall(b"these are not the headers you are looking for\r\n\r\n")
        if self.path == "/v1/models":
            return self.send(200, {"object": "list", "data": [{"id": self.options.model, "object": "model"}]})
        request = json.loads(self.body or b"{}")
        if wrong := self.wrong(request):
            return self.send(400, {"error": {"message": f"wrong {wrong}", "code": 400}})
        if self.options.status and self.faulty:
            return self.send(self.options.status, {"error": {"message": "as you wished", "code": self.options.status}})
        self.fault("before-headers")
        while self.options.hold and not os.path.exists(self.options.hold):
            time.sleep(0.002)
        match self.path.removeprefix("/v1"):
            case "/chat/completions":
                self.complete(request, chat=True)
            case "/completions":
                self.complete(request, chat=False)
            case "/messages":
                self.send_message(request)
            case "/messages/count_tokens":
                self.send(200, {"input_tokens": 3})
            case "/embeddings":
                inputs = request["input"] if isinstance(request["input"], list) else [request["input"]]
                data = [
                    {"object": "embedding", "index": i, "embedding": [float(len(str(text))), 0.5, -0.5]}
                    for i, text in enumerate(inputs)
                ]
                self.send(200, {"object": "list", "model": self.options.model, "data": data, "usage": usage(1, 0)})
            case _:
                self.send(404, {"error": {"message": f"no route {self.path}", "code": 404}})

    def wrong(self, request: dict) -> str:
        """The first field of a type that engines refuse, "" without one."""
        kinds = {"max_tokens": int, "stream": bool, "stream_options": dict, "input": str | list, "samplers": list}
        found = (name for name, kind in kinds.items() if not isinstance(request.get(name), kind | None))
        missing = self.path == "/v1/embeddings" and not isinstance(request.get("input"), str | list)
        return next(found, "input" if missing else "")

    def complete(self, request: dict, *, chat: bool) -> None:
        count = len(self.engine.words) or self.tokens(request)
        if request.get("stream"):
            return self.stream_several(request, count) if answers(request) > 1 else self.stream(request, count, chat)
        words = [self.word(number) for number in range(count)]
        text = "".join(words)
        choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        self.fault("after-headers", head=self.head(200, "application/json", "Content-Length: 10000"))
        self.send(200, self.frame(chat, "", {**choice, "finish_reason": "stop"}) | {"usage": usage(3, count)})

    def stream(self, request: dict, count: int, chat: bool) -> None:
        self.connection.sendall(self.head(200, "text/event-stream", "Transfer-Encoding: chunked"))
        self.fault("after-headers")
        if self.options.reasoning:
            self.event(self.frame(chat, ".chunk", {"delta": {"reasoning_content": self.options.reasoning}}))
        for number in range(count):
            word = self.word(number)
            self.event(self.frame(chat, ".chunk", {"delta": {"content": word}} if chat else {"text": word}))
        calls = self.round(request)
        for index, (name, arguments) in enumerate(calls):
            text = json.dumps(arguments)  # in two pieces, as real ones come
            first = {"index": index, "id": f"c{index}", "function": {"name": name, "arguments": text[:3]}}
            for part in (first, {"index": index, "function": {"arguments": text[3:]}}):
                self.event(self.frame(chat, ".chunk", {"delta": {"tool_calls": [part]}}))
        if self.options.tool:
            call = {"index": 0, "id": "c", "function": {"name": self.options.tool, "arguments": '{"city": "Paris"}'}}
            self.event(self.frame(chat, ".chunk", {"delta": {"tool_calls": [call]}}))
        last = self.frame(chat, ".chunk", {"delta": {}} if chat else {"text": ""})
        last["choices"][0]["finish_reason"] = "tool_calls" if calls else "stop"
        self.event(last)
        if (request.get("stream_options") or {}).get("include_usage"):
            speed = dict.fromkeys(("prompt_per_second", "predicted_per_second"), self.options.timings)
            told = {"timings": speed} if self.options.timings else {}
            self.event({**last, "choices": [], "usage": usage(3, count), **told})
        self.event("[DONE]")
        self.connection.sendall(b"0\r\n\r\n")

    def stream_several(self, request: dict, count: int) -> None:
        """Several choices, each with a usage of its own, as llama.cpp has them: those of a chat in an event without
        choices, if they are wanted, those of completions in the last event."""
        chat = "messages" in request
        wanted = (request.get("stream_options") or {}).get("include_usage")
        self.connection.sendall(self.head(200, "text/event-stream", "Transfer-Encoding: chunked"))
        for index in reversed(range(answers(request))):
            for number in range(count):
                text = self.word(number)
                part = {"delta": {"content": text}} if chat else {"text": text}
                self.event(self.frame(chat, ".chunk", {"index": index, **part}))
            end: dict = {"delta": {}} if chat else {"text": ""}
            last = self.frame(chat, ".chunk", {"index": index, "finish_reason": "stop", **end})
            used = {"usage": usage(3, count)}
            self.event(last if chat else last | used)
            if chat and wanted:
                self.event({**last, "choices": [], **used})
        self.event("[DONE]")
        self.connection.sendall(b"0\r\n\r\n")

    def round(self, request: dict) -> list:
        """The calls of this answer: those of the first round whose results are not there yet, if their tools are."""
        done = sum(
            message.get("role") == "assistant" for message in request.get("messages") or () if "tool_calls" in message
        )
        known = [tool["function"]["name"] for tool in request.get("tools") or ()]
        rounds = [json.loads(text) for text in self.options.round]
        return rounds[done] if done < len(rounds) and known else []

    def send_message(self, request: dict) -> None:
        """Anthropic's form of an answer."""
        count = self.tokens(request)
        message = {"id": "fake-1", "type": "message", "role": "assistant", "model": self.options.model}
        message |= {"content": [], "stop_reason": None, "stop_sequence": None}
        used = {"input_tokens": 3, "output_tokens": count}
        if not request.get("stream"):
            text = "".join(self.word(number) for number in range(count))
            content = [{"type": "text", "text": text}]
            return self.send(200, message | {"content": content, "stop_reason": "end_turn", "usage": used})
        self.connection.sendall(self.head(200, "text/event-stream", "Transfer-Encoding: chunked"))
        self.named_event("message_start", message=message | {"usage": used | {"output_tokens": 0}})
        self.named_event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        for number in range(count):
            delta = {"type": "text_delta", "text": self.word(number)}
            self.named_event("content_block_delta", index=0, delta=delta)
        self.named_event("content_block_stop", index=0)
        stop = {"stop_reason": "end_turn", "stop_sequence": None}
        self.named_event("message_delta", delta=stop, usage={"output_tokens": count})
        self.named_event("message_stop")
        self.connection.sendall(b"0\r\n\r\n")

    def named_event(self, kind: str, **fields: object) -> None:
        payload = f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
        self.connection.sendall(b"%x\r\n%s\r\n" % (len(payload), payload))

    def tokens(self, request: dict) -> int:
        wanted: int = request.get("max_tokens") or self.options.tokens
        return min(wanted, int(self.options.most_tokens))

    def word(self, number: int) -> str:
        """Sends the next token, after the time it takes. Ends the work if the client has left."""
        self.fault(str(number))
        seconds = (1 / self.options.rate if self.options.rate else 0) + self.options.first_token_after * (
            not number and self.faulty
        )
        gate = self.options.token_gate if number else None
        while not (readable := self.readable(seconds)) and gate and not os.path.exists(gate):
            seconds = 0.005
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            self.engine.record(left=self.path, tokens=number)
            raise Gone
        if self.options.clock:
            return f"{time.monotonic_ns()} "
        return self.engine.words[number] if self.engine.words else f"w{number} "

    def readable(self, seconds: float) -> bool:
        return bool(select.select([self.connection], [], [], seconds)[0])

    def frame(self, chat: bool, suffix: str, choice: dict) -> dict:
        kind = f"chat.completion{suffix}" if chat else "text_completion"
        choices = [{"index": 0, "finish_reason": None, **choice}]
        return {"id": "fake-1", "object": kind, "created": 1, "model": self.options.model, "choices": choices}

    def event(self, data: object) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        payload = f"data: {text}\n\n".encode()
        self.connection.sendall(b"%x\r\n%s\r\n" % (len(payload), payload))

    def send(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.connection.sendall(self.head(status, "application/json", f"Content-Length: {len(data)}") + data)

    def head(self, status: int, kind: str, framing: str) -> bytes:
        return f"HTTP/1.1 {status} Fake\r\nContent-Type: {kind}\r\n{framing}\r\n\r\n".encode()

    def fault(self, when: str, head: bytes = b"") -> None:
        """Ends the process or the connection here, if a knob asks for that."""
        if not self.faulty or when not in (self.options.die, self.options.drop, self.options.hang):
            return
        self.connection.sendall(head)
        if when == self.options.hang:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(3600)  # this thread may go on for a moment
        if when == self.options.die:
            quoted = self.body.decode(errors="replace") if self.options.quote else "an instance of 'fake::error'"
            log(f"terminate called after throwing {quoted}")
            os.kill(os.getpid(), signal.SIGKILL)
        self.connection.shutdown(socket.SHUT_RDWR)
        raise Gone


def answers(request: dict) -> int:
    """How many choices an answer has."""
    prompt = request.get("prompt")
    return (request.get("n") or 1) * (len(prompt) if isinstance(prompt, list) else 1)


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


if __name__ == "__main__":
    Engine(parse()).run()
