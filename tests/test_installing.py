"""The line that installs an extra fits where the package came from."""

import json

import pytest

from provider_llamacpp.commands import installing
from provider_llamacpp.commands.installing import pip_install


class Installed:
    """The distribution as pip has written it down."""

    def __init__(self, told):
        self.told = told

    def from_name(self, name):
        if self.told is None:
            raise installing.PackageNotFoundError(name)
        return self

    def read_text(self, name):
        assert name == "direct_url.json"
        return self.told if isinstance(self.told, str) else json.dumps(self.told)


@pytest.fixture
def installed(monkeypatch):
    def come_from(told, here):
        monkeypatch.setattr(installing, "Distribution", Installed(told))
        monkeypatch.setattr(installing, "__file__", str(here / "package" / "commands" / "x.py"))

    return come_from


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "a checkout"
    folder.mkdir()
    (folder / "setup.cfg").touch()
    return folder


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_from_an_index(installed, elsewhere):
    installed("", elsewhere)
    assert pip_install("local") == "pip install 'provider-llamacpp[local]'"
    assert pip_install(upgrade=True) == "pip install --upgrade provider-llamacpp"
    installed({"url": "https://host/provider.whl"}, elsewhere)
    assert pip_install("local") == "pip install 'provider-llamacpp[local]'"


def test_from_a_checkout(installed, checkout, elsewhere, monkeypatch):
    installed({"url": checkout.as_uri(), "dir_info": {}}, elsewhere)
    assert pip_install("bench") == f"pip install '{checkout}[bench]'"
    assert pip_install(upgrade=True) == f"pip install --upgrade '{checkout}'"
    monkeypatch.chdir(checkout)
    assert pip_install("bench") == "pip install '.[bench]'"


def test_right_from_a_checkout(installed, checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    installed({"url": checkout.as_uri(), "dir_info": {"editable": True}}, checkout)
    assert pip_install("bench") == "pip install -e '.[bench]'"
    for told in (None, "no json", '["odd"]'):
        installed(told, checkout)
        assert pip_install("bench") == "pip install '.[bench]'"


def test_a_checkout_that_is_gone_or_a_file(installed, elsewhere):
    for path in (elsewhere / "gone", elsewhere):
        installed({"url": path.as_uri()}, elsewhere)
        assert pip_install("bench") == "pip install 'provider-llamacpp[bench]'"
