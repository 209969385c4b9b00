"""Every program of docs/recipes.md runs as it stands there against llama.cpp, but for the address: the daemon's port is
another one. The names of its models are aliases of the tests' own, which can do the same."""

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from modelrunner.store import Store
from tests.clients.test_snippets import USUAL
from tests.e2e.conftest import MINILM, SMOLLM2, StartDaemon
from tests.e2e.daemons import Daemon
from tests.e2e.test_images_and_sound import PIXEL
from tests.models import projector, random_llama, scripted
from tests.waiting import HUNG

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
RECIPES = {
    part.partition("\n")[0]: re.findall(r"^```python\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
    for part in re.split("^## ", PAGE, flags=re.MULTILINE)[1:]
}
TRAIN = "Trains to Rome leave at nine."
# A chat template with which SmolLM2 thinks, or does not: it goes on as four answers before.
TEMPLATE = """{%- set thought = "Seven times thirteen." if enable_thinking is not defined or enable_thinking else "" %}
{%- for example in [1, 2, 3, 4] %}<|im_start|>user
Is 91 a prime number?<|im_end|>
<|im_start|>assistant
<think>
{{ thought }}
</think>

No, it is not.<|im_end|>
{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
MODELS = {
    "Tools": "test/calls",
    "Structured output": SMOLLM2,
    "Thinking": "test/thinks",
    "Images": "test/sees",
    "Embeddings, with a search in ten lines": MINILM,
    "A batch": SMOLLM2,
}
SAYS: dict[str, Callable[[str], object]] = {
    "Tools": lambda said: said == scripted.SENTENCE,
    "Structured output": lambda said: re.fullmatch("(good|bad|mixed) [1-5]", said),
    "Thinking": lambda said: re.search(
        r"^It thinks: Seven times thirteen.\n+It says: No, it is not.\nAt once: [^<\n]+$", said
    ),
    "Images": lambda said: said,
    "Embeddings, with a search in ten lines": lambda said: said == TRAIN,
    "A batch": lambda said: re.findall(r"^(\w+) .", said, re.MULTILINE)[:1] == ["cat"],
}


@pytest.fixture(scope="module")
def daemon(make_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    daemon: Daemon = make_daemon()
    daemon.start(listen="127.0.0.1:0")
    folder = tmp_path_factory.mktemp("recipes")
    smollm2 = Store(daemon.data).bundle(SMOLLM2).model_file
    calls = scripted.write(folder / "calls.gguf", smollm2, ("get_weather", {"city": "Paris"}))
    random = random_llama.write(folder / "random.gguf")
    eyes = projector.write(folder / "eyes.gguf", sees=True, hears=False, width=random_llama.WIDTH)
    thinks = folder / "Modelfile"
    thinks.write_text(f'FROM {SMOLLM2}\nPARAMETER temperature 0\nTEMPLATE """{TEMPLATE}"""\n')
    for arguments in (
        ("package", "--gguf", calls, "test/calls"),
        ("package", "--gguf", random, "--mmproj", eyes, "test/sees"),
        ("create", "test/thinks", "-f", thinks),
    ):
        made = daemon.run(*map(str, arguments))
        assert made.returncode == 0, made.stderr
    for model in set(MODELS.values()) - {MINILM}:
        given = daemon.run("configure", model, "--max-tokens", "40")
        assert given.returncode == 0, given.stderr
    return daemon


def test_there_is_a_model_for_each() -> None:
    assert RECIPES.keys() == MODELS.keys()
    assert {len(programs) for programs in RECIPES.values()} == {1}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe(recipe: str, daemon: Daemon, tmp_path: Path) -> None:
    [program] = RECIPES[recipe]
    [name] = set(re.findall(r'"(hf\.co/[^"]+)"', program))
    alias = f"[aliases]\n{json.dumps(name)} = {json.dumps(MODELS[recipe])}\n"
    Path(daemon.environment["MODELRUNNER_CONFIG"]).write_text(alias)
    assert daemon.run("reload").returncode == 0
    base = daemon.get("/version").json()["listen"]
    assert ("from openai" in program) == (USUAL in program)
    (tmp_path / "photo.png").write_bytes(base64.b64decode(PIXEL))
    done = subprocess.run(
        [sys.executable, "-c", program.replace(USUAL, base)],
        cwd=tmp_path,
        env=daemon.environment | {"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=HUNG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[recipe](done.stdout.strip()), done.stdout
