import dataclasses

import pytest

from provider_llamacpp.errors import SettingsError
from provider_llamacpp.settings import DEFAULT_URL, Settings, from_environment, unknown_variables


def test_defaults_are_those_of_the_contracts():
    settings = Settings()
    assert settings.url == DEFAULT_URL == "ws://127.0.0.1:49134"
    assert settings.name == "provider-llamacpp"
    assert settings.key_variable == "LLAMACPP_API_KEY"
    assert (settings.max_streams, settings.ping_interval, settings.drain) == (64, 25.0, 10.0)


def test_another_id_has_its_own_name_and_key():
    settings = Settings(id="pi-5")
    assert settings.name == "provider-pi-5"
    assert settings.key_variable == "PI_5_API_KEY"
    assert Settings(id="a", worker_name="mine").name == "mine"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "Bad Id"),
        ("id", ""),
        ("id", "x" * 65),
        ("url", "http://h"),
        ("url", "ws://"),
        ("url", "ws://h:99999"),
        ("api_url", "localhost:8080"),
        ("api_url", "http://"),
        ("api_url", "http://h:99999"),
        ("namespace", "  "),
        ("max_streams", 0),
        ("max_requests", 0),
        ("ping_interval", 0),
        ("ping_interval", float("nan")),
        ("connect_timeout", -1),
        ("drain", -1),
        ("log_level", "loud"),
        ("allow_server_tools", ("all",)),
        ("allow_server_tools", ("a b",)),
    ],
)
def test_a_bad_value_is_named(field, value):
    with pytest.raises(SettingsError) as caught:
        Settings(**{field: value})
    assert field in str(caught.value)


@pytest.mark.parametrize("field", ["url", "api_url"])
@pytest.mark.parametrize(
    "url",
    [
        "htp://joe:s3cret@host/?token=s3cret",
        "htp://joe:s3/cret@host",
        "htp://joe:s@s3cret@host",
        "joe:s3cret@host",
        "ws://joe:s3cret",
        "http://joe:s3cret",
        "http://[s3cret@host",
        "ws://s3cret@ho\u2100st",
    ],
)
def test_a_bad_url_is_named_but_not_shown(field, url):
    with pytest.raises(SettingsError) as caught:
        Settings(**{field: url})
    assert str(caught.value).startswith(f"{field}: ")
    assert "s3" not in str(caught.value) and "cret" not in str(caught.value)


def test_secrets_are_not_in_the_repr():
    shown = repr(Settings(token="tok-1", api_key="key-1"))
    assert "tok-1" not in shown
    assert "key-1" not in shown


def test_flags_come_before_environment_before_defaults():
    environ = {
        "III_URL": "ws://a:1",
        "III_WS_URL": "ws://b:1",
        "PROVIDER_LLAMACPP_MAX_STREAMS": "8",
        "PROVIDER_LLAMACPP_FAT_DELTAS": "yes",
        "PROVIDER_LLAMACPP_LOG_JSON": "off",
        "PROVIDER_LLAMACPP_DRAIN": "2.5",
        "III_NAMESPACE": "  ",
        "III_TOKEN": "tok",
    }
    settings = from_environment(environ, max_streams=None, ping_interval=5.0)
    assert settings.url == "ws://a:1"
    assert settings.max_streams == 8
    assert settings.fat_deltas is True
    assert settings.log_json is False
    assert settings.drain == 2.5
    assert settings.ping_interval == 5.0
    assert settings.namespace is None
    assert settings.token == "tok"
    assert from_environment(environ, max_streams=3).max_streams == 3
    assert from_environment({"III_WS_URL": "ws://b:1"}).url == "ws://b:1"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("yes", ("read",)),
        ("off", ()),
        ("read, write_file", ("read", "write_file")),
        ("mcp.a:b", ("mcp.a:b",)),
    ],
)
def test_server_tools_by_the_environment(text, names):
    environ = {"PROVIDER_LLAMACPP_ALLOW_SERVER_TOOLS": text}
    assert from_environment(environ).allow_server_tools == names


def test_the_key_comes_from_the_ids_own_variable():
    environ = {"LLAMACPP_API_KEY": " one ", "PI5_API_KEY": "two"}
    assert from_environment(environ).api_key == "one"
    assert from_environment(environ, id="pi5").api_key == "two"
    assert from_environment({}).api_key is None


@pytest.mark.parametrize(
    ("name", "text"), [("MAX_STREAMS", "many"), ("FAT_DELTAS", "perhaps"), ("DRAIN", "x")]
)
def test_a_bad_variable_is_named(name, text):
    with pytest.raises(SettingsError, match=f"PROVIDER_LLAMACPP_{name}"):
        from_environment({f"PROVIDER_LLAMACPP_{name}": text})


def test_a_misspelt_variable_is_found():
    environ = {"PROVIDER_LLAMACPP_MAX_STREAM": "8", "PROVIDER_LLAMACPP_DRAIN": "1", "PATH": "/"}
    assert unknown_variables(environ) == ["PROVIDER_LLAMACPP_MAX_STREAM"]


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().id = "x"  # type: ignore[misc]
