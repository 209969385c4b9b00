"""What a person or an index reads of the package, wherever it was installed from."""

import json
import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import click
import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from modelrunner import __version__
from modelrunner.cli.commands import cli
from modelrunner.gateway.access import Access, host_names
from modelrunner.modelfile import parse

ROOT = Path(__file__).parent.parent


def test_the_license_and_the_machines_are_named() -> None:
    package = distribution("modelrunner")
    assert package.metadata["License-Expression"] == "Apache-2.0"
    [text] = [file for file in package.files or [] if file.name == "LICENSE"]
    assert "Apache License" in text.read_text()
    classifiers = package.metadata.get_all("Classifier") or []
    assert {"Operating System :: POSIX :: Linux", "Typing :: Typed"} <= set(classifiers)


def test_the_version_stands_in_one_place() -> None:
    assert distribution("modelrunner").version == __version__
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]


def test_every_command_that_a_text_names_is_there() -> None:
    """In code, a text may be broken within the name of a command: the quotation marks between are left out."""
    folders = [ROOT / name for name in ("modelrunner", "backends", "docs", "contrib")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md", ".js", ".html")]
    texts = {path: re.sub(r'"\n\s*f?"', "", path.read_text()) for path in [ROOT / "README.md", *files]}
    named = {(word, path.name) for path, text in texts.items() for word in re.findall(r"`modelrunner ([a-z-]+)", text)}
    assert len(named) > 50
    with click.Context(cli) as context:
        assert {(word, file) for word, file in named if not (word[0] == "-" or cli.get_command(context, word))} == set()


def test_the_modelfile_in_the_documentation_is_read_as_it_is_meant() -> None:
    blocks = (ROOT / "docs" / "models.md").read_text().split("```")[1::2]
    [text] = [block for block in blocks if block.startswith("\n") and "FROM " in block]
    made = parse(text)
    assert (made.base, made.system, made.adapters) == ("smollm2", "You are Mario.", ("./style.gguf",))
    assert made.parameters == {"temperature": 0.2, "enable_thinking": False, "stop": ["END", "STOP"]}
    assert made.messages == (("user", "Who are you?"), ("assistant", "It's me!"))
    assert made.template is not None
    assert made.template.endswith("{% endfor %}")
    assert len(made.licences) == 1
    assert not [value for value in (made.base, made.system, *made.adapters, *made.licences) if "#" in str(value)]


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes/modelrunner.yaml", "kubernetes/cluster.yaml"])
def test_the_files_for_containers_are_yaml_and_say_that_they_are_untried(name: str) -> None:
    text = (ROOT / "contrib" / name).read_text()
    assert all(isinstance(document, dict) for document in yaml.safe_load_all(text))
    assert text.startswith("# Untried")


@pytest.mark.parametrize("name", ["modelrunner.yaml", "cluster.yaml"])
def test_the_files_for_kubernetes_match_their_schemas(name: str) -> None:
    """`kubernetes.json` has the fields that they use, of the schemas of Kubernetes 1.37 and of KubeRay 1.7 (RayCluster,
    ray.io/v1), and no others: a field that is added here is added there, from the same schemas."""
    schemas = json.loads((ROOT / "tests" / "kubernetes.json").read_text())
    for document in yaml.safe_load_all((ROOT / "contrib" / "kubernetes" / name).read_text()):
        schema = schemas[document["kind"]]
        jsonschema.validate(document, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(document | {"spce": {}}, schema)


def test_the_probes_of_kubernetes_name_a_host_that_is_served() -> None:
    documents = yaml.safe_load_all((ROOT / "contrib" / "kubernetes" / "modelrunner.yaml").read_text())
    deployment = next(document for document in documents if document["kind"] == "Deployment")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    [port] = container["ports"]
    probes = [container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    hosts = {header["value"] for probe in probes for header in probe["httpHeaders"] if header["name"] == "Host"}
    assert hosts
    access = Access(host_names(port["containerPort"], []))
    for host in hosts:
        access.check(host, None, None, local=False)
