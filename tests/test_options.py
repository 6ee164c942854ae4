import dataclasses
import pickle
from pathlib import Path

import pytest

from telegrad.group.secret import given_secret, key_of
from telegrad.options import (
    Options,
    RpcBackendOptions,
    _report_misspelt_variables,
    as_options,
    option_rows,
    options_markdown,
)
from telegrad.testing import cluster


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, _, variable, _ in option_rows():
        if variable:
            monkeypatch.delenv(variable, raising=False)


def test_each_option_has_a_default_a_meaning_and_a_variable_of_its_own() -> None:
    rows = option_rows()
    variables = [variable for _, _, variable, _ in rows if variable]
    assert len(set(variables)) == len(variables) == len(rows) - 1  # init_method has none
    assert all(meaning and default for _, default, _, meaning in rows)
    assert [row[0] for row in rows] == [field.name for field in dataclasses.fields(Options)]
    assert options_markdown().count("\n") == len(rows) + 2


def test_environment_is_used_without_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_SPIN_US", "7")
    monkeypatch.setenv("TELEGRAD_RPC_TIMEOUT", "2.5")
    monkeypatch.setenv("TELEGRAD_TRANSPORTS", "tcp, unix")
    monkeypatch.setenv("TELEGRAD_BIND", "10.0.0.1")
    options = Options()
    assert (options.spin_us, options.rpc_timeout, options.transports) == (7, 2.5, ("tcp", "unix"))
    assert options.bind == "10.0.0.1"
    assert Options(spin_us=50).spin_us == 50  # even if that is the default
    assert as_options(RpcBackendOptions(rpc_timeout=3)).spin_us == 7


def test_invalid_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_SPIN_US", "much")
    with pytest.raises(ValueError, match=r"TELEGRAD_SPIN_US should hold a whole number, but is 'much'"):
        Options()
    monkeypatch.setenv("TELEGRAD_SPIN_US", "1")
    monkeypatch.setenv("TELEGRAD_HEARTBEAT", "much")
    with pytest.raises(ValueError, match=r"TELEGRAD_HEARTBEAT should hold a number, but is 'much'"):
        Options()


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        ({"rpc_timeout": -1}, RuntimeError, "RPC Timeout must be non-negative"),
        ({"rpc_timeout": "1"}, TypeError, "incompatible constructor arguments"),
        ({"rpc_timeout": float("nan")}, RuntimeError, "RPC Timeout must be non-negative"),
        ({"init_method": 1}, TypeError, "incompatible constructor arguments"),
        ({"num_worker_threads": 0}, RuntimeError, "num_worker_threads must be positive, got 0"),
        ({"num_worker_threads": 1.5}, TypeError, "incompatible constructor arguments"),
        ({"num_worker_threads": 100_000}, ValueError, "num_worker_threads is at most 65536, not 100000"),
        ({"spin_us": -1}, ValueError, "option spin_us has to be a number of us"),
        ({"pool_cache_bytes": "big"}, TypeError, "option pool_cache_bytes"),
        ({"transports": ("pigeon",)}, ValueError, "option transports has to name some of shm, unix, tcp"),
        ({"transports": ()}, ValueError, "option transports"),
        ({"secret": "secret number one", "secret_file": "b"}, ValueError, "not both"),
        ({"max_objects": 65535}, ValueError, "option max_objects has to be 65536 or more, not 65535"),
        ({"encryption": "on"}, ValueError, "auto or off"),
        ({"bind": "10.0.0.1:5000"}, ValueError, "option bind has to be an address without a port"),
        ({"bind": "[fe80::1]:5000"}, ValueError, "option bind has to be an address without a port"),
        ({"tls_cert": "a", "tls_key": "b"}, ValueError, "all of the options tls_cert, tls_key and tls_ca"),
        ({"tls_cert": "a", "tls_key": "b", "tls_ca": "c", "encryption": "off"}, ValueError, "need encryption"),
    ],
)
def test_invalid_values(wrong: dict[str, object], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        Options(**wrong)  # type: ignore[arg-type]


NAN, INF = float("nan"), float("inf")
FLAGS = [row.name for row in dataclasses.fields(Options) if isinstance(row.metadata["default"], bool)]


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["0", "false", "", 0, 1, None], ids=repr)
def test_flags_are_true_or_false(name: str, value: object) -> None:
    """A text such as "0" is true, and would leave on what it is meant to switch off."""
    with pytest.raises(TypeError, match=f"option {name} has to be True or False.*TELEGRAD_{name.upper()} to 1"):
        Options(**{name: value})  # type: ignore[arg-type]
    options = Options()
    setattr(options, name, value)
    with pytest.raises(TypeError, match=name):
        as_options(options)


ROWS = dataclasses.fields(Options)
WHOLE = [row.name for row in ROWS if row.type is int]
SECONDS = [row.name for row in ROWS if row.type is float]
TEXTS = [row.name for row in ROWS if row.type in (str, str | None)]
ZERO_IS_WRONG = ("handshake_timeout", "member_lease")


def refused(name: str, value: object, kind: type[Exception], text: str = "") -> None:
    with pytest.raises(kind, match=text or name) as caught:
        Options(**{name: value})  # type: ignore[arg-type]
    assert type(caught.value) is kind


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers(name: str) -> None:
    mistyped: tuple[object, ...] = (True, 2.0, "2", None, [], NAN)
    for wrong in mistyped:
        refused(name, wrong, TypeError)
    refused(name, -1, RuntimeError if name == "num_worker_threads" else ValueError)
    for large in (1 << 63, 10**400):
        refused(name, large, ValueError)


@pytest.mark.parametrize("name", SECONDS)
def test_numbers_of_seconds(name: str) -> None:
    mistyped: tuple[object, ...] = (True, "2", None, [], 1j)
    for wrong in mistyped:
        refused(name, wrong, TypeError)
    for negative in (-1, -0.5, NAN, -INF):
        if name == "rpc_timeout":
            refused(name, negative, RuntimeError, "RPC Timeout must be non-negative")
        else:
            refused(name, negative, ValueError)
    for right in (3, 0.5, *(() if name in ZERO_IS_WRONG else (0,))):
        assert getattr(Options(**{name: right}), name) == right
    if name in ZERO_IS_WRONG:
        refused(name, 0, ValueError, "more than 0, not 0")
    if name != "rpc_timeout":  # for which infinity is no limit
        for long in (INF, 1e30, 10**400):
            refused(name, long, ValueError, "at most 1,000,000,000")


@pytest.mark.parametrize("name", TEXTS)
def test_texts(name: str) -> None:
    mistyped: tuple[object, ...] = (b"0123456789abcdef", 5, [], {}, Path("/tmp"))
    for wrong in mistyped:
        refused(name, wrong, TypeError)
    row = next(row for row in ROWS if row.name == name)
    if row.type is str:
        refused(name, None, TypeError)
    else:
        assert getattr(Options(**{name: None}), name) is None  # type: ignore[arg-type]


def test_texts_of_type_errors() -> None:
    refused("bind", 5, TypeError, "option bind has to be a string or None, not 5")
    refused("encryption", None, TypeError, "option encryption has to be a string, not None")
    refused("spin_us", 0.5, TypeError, "option spin_us has to be a whole number of us, 0 or more, not 0.5")
    refused("tcp_lanes", 2.5, TypeError, "option tcp_lanes has to be a whole number from 1 to 16, not 2.5")
    for wrong in ("tcp", b"tcp", 5, [["tcp"]], None):
        refused("transports", wrong, TypeError, "transports has to be a tuple of names")
    with pytest.raises(TypeError, match="secret has to be a string or None, not an object of type bytes") as caught:
        Options(secret=b"secret number one")  # type: ignore[arg-type]
    assert "number one" not in str(caught.value)


def test_largest_values_start_a_worker() -> None:
    largest = {row.name: (1 << 63) - 1 for row in ROWS if row.metadata["unit"] in ("bytes", "references", "contexts")}
    times = {name: 1e9 for name in SECONDS if name != "shutdown_timeout"}
    with cluster(2, Options(**largest, **times)) as group:  # type: ignore[arg-type]
        assert group[0].rpc_sync("w1", abs, (-1,)) == 1


@pytest.mark.parametrize("name", FLAGS)
def test_flags_of_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("0", "1"):
        monkeypatch.setenv(f"TELEGRAD_{name.upper()}", text)
        assert getattr(Options(), name) is (text == "1")
    assert getattr(Options(**{name: False}), name) is False  # type: ignore[arg-type]


def test_values_are_checked_again_by_a_worker() -> None:
    options = Options()
    options.spin_us = -1
    with pytest.raises(ValueError, match="spin_us"):
        as_options(options)


def test_secret_comes_from_option_or_file_and_is_never_shown(tmp_path: Path) -> None:
    assert given_secret(Options()) is None
    assert given_secret(Options(secret="secret number one")) == b"secret number one"
    assert "number one" not in repr(Options(secret="secret number one"))
    file = tmp_path / "secret"
    file.write_text(" secret number two\n")
    assert given_secret(Options(secret_file=str(file))) == b"secret number two"
    file.write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        given_secret(Options(secret_file=str(file)))


def test_secrets_have_16_bytes_or_more(tmp_path: Path) -> None:
    Options(secret="16 bytes: enough")
    with pytest.raises(ValueError, match=r"option secret .* has 15 bytes. Give at least 16"):
        Options(secret="correct horse 1")
    file = tmp_path / "secret"
    file.write_text("correct horse 1\n")
    with pytest.raises(ValueError, match=r"holds a secret of 15 bytes. Give at least 16"):
        given_secret(Options(secret_file=str(file)))


def test_phrases_are_stretched_and_random_bytes_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    stretched, memory = [], []

    def scrypt(secret: bytes, *, n: int, r: int, p: int, **_: object) -> bytes:
        stretched.append(secret)
        memory.append(128 * n * r * p)
        return bytes(32)

    monkeypatch.setattr("hashlib.scrypt", scrypt)
    phrases = [b"correct horse battery staple", b"a phrase\twith a tab", "ünfzehn Wörter".encode(), b"0123456789abcdef"]
    for secret in [*phrases, b"0123456789abcdef" * 2, bytes(range(240, 256))]:
        assert len(key_of(secret, "a token of this test")) == 32
    assert stretched == phrases
    assert set(memory) == {32 << 20}  # bytes of each try, which takes about a tenth of a second


def test_keys_depend_on_secret_and_group() -> None:
    keys = {key_of(secret, token) for secret in (b"secret number one", b"secret number two") for token in ("a", "b")}
    assert len(keys) == 4


@pytest.mark.parametrize("name", ["secret", "secret_file", "tls_cert", "tls_key", "tls_ca", "advertise"])
def test_empty_text_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty text must not switch off a secret, or certificates."""
    with pytest.raises(ValueError, match=f"option {name} .* is empty"):
        Options(**{name: ""})  # type: ignore[arg-type]
    monkeypatch.setenv(f"TELEGRAD_{name.upper()}", "")
    with pytest.raises(ValueError, match=f"TELEGRAD_{name.upper()}"):
        as_options(None)


def test_empty_certificates_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of a shell that are not set must not switch off certificates."""
    with pytest.raises(ValueError, match=r"tls_cert .* is empty, which would leave the worker without certificates"):
        Options(tls_cert="", tls_key="", tls_ca="")
    for name in ("CERT", "KEY", "CA"):
        monkeypatch.setenv(f"TELEGRAD_TLS_{name}", "")
    with pytest.raises(ValueError, match=r"TELEGRAD_TLS_CERT\) is empty.*unset the variable"):
        as_options(None)


def test_options_of_programs_written_for_torch() -> None:
    class Theirs(RpcBackendOptions):
        pass

    theirs = Theirs(rpc_timeout=5, init_method="tcp://h:1")
    theirs.rpc_timeout = 6
    ours = as_options(theirs)
    assert (ours.rpc_timeout, ours.init_method, ours.num_worker_threads) == (6, "tcp://h:1", 16)
    assert as_options(None).rpc_timeout == 60
    assert as_options(ours) is ours


def test_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(Options(spin_us=3))) == Options(spin_us=3)


def test_document_has_the_table() -> None:
    document = Path(__file__).parent.parent / "docs" / "options.md"
    assert document.read_text().endswith("\n" + options_markdown())


@pytest.mark.parametrize("lanes", [0, 17])
def test_number_of_lanes(lanes: int) -> None:
    with pytest.raises(ValueError, match="option tcp_lanes has to be a number from 1 to 16"):
        Options(tcp_lanes=lanes)


def test_misspelt_variables_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _report_misspelt_variables.cache_clear()
    for name in ("SECRETFILE", "TRANSPORT", "PORT", "SERVICE_HOST", "RPC_TIMEOUT"):
        monkeypatch.setenv(f"TELEGRAD_{name}", "1")
    as_options(None)
    as_options(Options())
    assert [record.getMessage() for record in caplog.records] == [
        f"the environment variable TELEGRAD_{name} is ignored: Telegrad has no such option. Is TELEGRAD_{meant} meant?"
        for name, meant in (("SECRETFILE", "SECRET_FILE"), ("TRANSPORT", "TRANSPORTS"))
    ]
