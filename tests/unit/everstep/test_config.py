from __future__ import annotations

import pytest

from everstep import config
from everstep.errors import ConfigurationError


@pytest.fixture
def home(tmp_path):
    (tmp_path / ".config/everstep").mkdir(parents=True)
    return tmp_path


def write(home, text, mode=0o600):
    path = home / ".config/everstep/config.toml"
    path.write_text(text)
    path.chmod(mode)


def test_arguments_win_over_the_environment_and_that_over_the_file(home):
    write(home, 'endpoint_url = "http://127.0.0.1:1"\ntoken = "filed"\n')
    environment = {"HOME": str(home)}
    assert config.load(environment=environment) == config.ClientConfig("http://127.0.0.1:1", "filed")
    environment |= {"EVERSTEP_ENDPOINT_URL": "http://127.0.0.1:2/", "EVERSTEP_TOKEN": "set\n"}
    assert config.load(environment=environment) == config.ClientConfig("http://127.0.0.1:2", "set")
    assert config.load("http://127.0.0.1:3", "given", environment) == config.ClientConfig("http://127.0.0.1:3", "given")


def test_xdg_is_honoured(tmp_path):
    (tmp_path / "everstep").mkdir()
    (tmp_path / "everstep/config.toml").write_text('endpoint_url = "https://everstep.example"')
    environment = {"XDG_CONFIG_HOME": str(tmp_path), "EVERSTEP_TOKEN": "t"}
    assert config.load(environment=environment).endpoint_url == "https://everstep.example"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "No endpoint is configured"),
        ({"EVERSTEP_ENDPOINT_URL": "http://127.0.0.1:1"}, "No token is configured for http://127.0.0.1:1"),
        ({"EVERSTEP_ENDPOINT_URL": "http://10.0.0.1:1", "EVERSTEP_TOKEN": "t"}, "cross the network unencrypted"),
        (
            {"EVERSTEP_ENDPOINT_URL": "http://127.0.0.1.example:1", "EVERSTEP_TOKEN": "t"},
            "cross the network unencrypted",
        ),
        ({"EVERSTEP_ENDPOINT_URL": "ftp://127.0.0.1", "EVERSTEP_TOKEN": "t"}, "not an http or https URL"),
        ({"EVERSTEP_ENDPOINT_URL": "http://[", "EVERSTEP_TOKEN": "t"}, "not an http or https URL"),
        ({"EVERSTEP_ENDPOINT_URL": "http://127.0.0.1:none", "EVERSTEP_TOKEN": "t"}, "not an http or https URL"),
        (
            {"EVERSTEP_ENDPOINT_URL": "https://me:secret@x.example", "EVERSTEP_TOKEN": "t"},
            "contains a user name or a password",
        ),
    ],
)
def test_what_is_missing_or_dangerous_is_refused(home, environment, words):
    with pytest.raises(ConfigurationError, match=words) as refused:
        config.load(environment={"HOME": str(home), **environment})
    assert "secret" not in refused.value.message


@pytest.mark.parametrize(
    "url", ["http://localhost:1", "http://127.9.9.9", "http://[::1]:8080", "https://everstep.example"]
)
def test_a_token_may_go_to_this_machine_or_through_tls(url):
    assert config.checked_endpoint(url) == url


def test_a_file_that_others_can_read_holds_no_token(home):
    write(home, 'token = "x"', mode=0o644)
    with pytest.raises(ConfigurationError, match="other users can read the file") as refused:
        config.load("http://127.0.0.1:1", environment={"HOME": str(home)})
    assert refused.value.hint.startswith("chmod 600")


@pytest.mark.parametrize(
    ("text", "words"),
    [("endpoint = 1", "unknown settings: endpoint"), ("token = 1", "must be text"), ("=", "is not TOML")],
)
def test_a_wrong_file_is_named(home, text, words):
    write(home, text)
    with pytest.raises(ConfigurationError, match=words):
        config.load(environment={"HOME": str(home)})


def test_a_token_is_not_shown():
    assert "hush" not in repr(config.ClientConfig("http://127.0.0.1", "hush"))


STAGING = (
    'endpoint_url = "http://127.0.0.1:1"\ntoken = "mine"\n[profiles.staging]\nendpoint_url = '
    '"http://127.0.0.1:2"\ntoken = "theirs"\n'
)


def test_a_profile_that_is_named_wins_over_the_environment_and_the_environment_may_name_one(home):
    write(home, STAGING)
    environment = {"HOME": str(home), "EVERSTEP_ENDPOINT_URL": "http://127.0.0.1:3", "EVERSTEP_TOKEN": "set"}
    assert config.load(environment=environment, profile="staging") == config.ClientConfig(
        "http://127.0.0.1:2", "theirs"
    )
    assert config.load(environment=environment, profile="default") == config.ClientConfig("http://127.0.0.1:1", "mine")
    assert config.load(environment={"HOME": str(home), "EVERSTEP_PROFILE": "staging"}).token == "theirs"
    assert config.load(environment={**environment, "EVERSTEP_PROFILE": "staging"}).token == "set"


def test_a_profile_that_is_not_there_is_named_with_those_that_are(home):
    write(home, STAGING)
    with pytest.raises(ConfigurationError, match="no profile 'production'; its profiles: default, staging") as refused:
        config.load(environment={"HOME": str(home)}, profile="production")
    assert refused.value.hint == "everstep configure --profile production"


def test_a_token_from_the_file_goes_to_its_own_endpoint_alone(home):
    write(home, STAGING)
    environment = {"HOME": str(home)}
    assert config.load("http://127.0.0.1:1/", environment=environment).token == "mine"
    for where in (
        {"endpoint_url": "http://127.0.0.1:9"},
        {"environment": {**environment, "EVERSTEP_ENDPOINT_URL": "http://127.0.0.1:9"}},
    ):
        with pytest.raises(
            ConfigurationError,
            match=r"is for http://127\.0\.0\.1:1; the client does not send it to http://127\.0\.0\.1:9",
        ):
            config.load(**{"environment": environment, **where})
    assert (
        config.load("http://127.0.0.1:9", environment={**environment, "EVERSTEP_TOKEN": "its own"}).token == "its own"
    )


def test_a_ca_bundle_from_the_file_is_for_its_own_endpoint_alone(home):
    bundle = home / "company.pem"
    write(home, f'endpoint_url = "https://company.example/"\ntoken = "filed"\nca_bundle = "{bundle}"\n')
    elsewhere = {"HOME": str(home), "EVERSTEP_ENDPOINT_URL": "https://public.example", "EVERSTEP_TOKEN": "another"}
    assert config.load(environment=elsewhere).ca_bundle is None, "nor is it looked for"
    bundle.write_text("certificates")
    assert config.load(environment={"HOME": str(home)}).ca_bundle == str(bundle)


def test_writing_a_profile_leaves_the_others(home):
    environment = {"HOME": str(home)}
    write(home, STAGING)
    config.write(config.ClientConfig("http://127.0.0.1:4", 'quoted "token"'), environment, profile="new")
    config.write(config.ClientConfig("http://127.0.0.1:5", "mine now"), environment)
    assert {name: (found.endpoint_url, found.token) for name, found in config.profiles(environment).items()} == {
        "default": ("http://127.0.0.1:5", "mine now"),
        "new": ("http://127.0.0.1:4", 'quoted "token"'),
        "staging": ("http://127.0.0.1:2", "theirs"),
    }


@pytest.mark.parametrize("name", ["", "a.b", "a b", 'x"', "[x]", "x" * 64])
def test_a_profile_has_a_plain_name(home, name):
    with pytest.raises(ConfigurationError, match="cannot have the name"):
        config.write(config.ClientConfig("http://127.0.0.1:4", "t"), {"HOME": str(home)}, profile=name)


@pytest.mark.parametrize(
    "text", ["profiles = 1", "[profiles]\nx = 1", "[profiles.x]\ntoken = 1", "[profiles.x]\nother = 'x'"]
)
def test_a_wrong_profile_is_refused(home, text):
    write(home, text)
    with pytest.raises(ConfigurationError):
        config.load(environment={"HOME": str(home)})
