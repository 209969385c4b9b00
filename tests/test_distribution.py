"""What a person or an index reads of the package, wherever it was installed from."""

from importlib.metadata import distribution


def test_the_license_and_the_machines_are_named() -> None:
    package = distribution("modelrunner")
    assert package.metadata["License-Expression"] == "Apache-2.0"
    [text] = [file for file in package.files or [] if file.name == "LICENSE"]
    assert "Apache License" in text.read_text()
    classifiers = package.metadata.get_all("Classifier") or []
    assert {"Operating System :: POSIX :: Linux", "Typing :: Typed"} <= set(classifiers)
