import pytest

from modelrunner.errors import InvalidReference
from modelrunner.store import Digest

HEX = "0123456789abcdef" * 4


def test_the_usual_form_and_back():
    assert str(Digest.parse(f"sha256:{HEX}")) == f"sha256:{HEX}"
    assert str(Digest.of(b"")) == "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize(
    "text",
    [
        "",
        HEX,
        f"sha256:{HEX}\n",
        f"sha256:{HEX.upper()}",
        f"sha256:{HEX[1:]}",
        f"sha256:{HEX}0",
        f"SHA256:{HEX}",
        f"sha512:{HEX}",
        f"sha256:../../{HEX[6:]}",
        f"sha256:{HEX[:-1]}\0",
        f"sha256:{HEX[:-1]}\N{FULLWIDTH DIGIT ONE}",
        f"sha256-{HEX}",
    ],
)
def test_nothing_else_becomes_a_path(text):
    with pytest.raises(InvalidReference):
        Digest.parse(text)


def test_strangers_files_are_passed_over(tmp_path):
    for name in (HEX, f"{HEX}.part", ".DS_Store", HEX.upper()):
        (tmp_path / name).touch()
    assert Digest.among(tmp_path) == {Digest(HEX)}
