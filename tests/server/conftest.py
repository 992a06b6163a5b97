"""One service for all tests of a session, and clients for it."""

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

from tests.engine.published import write_case  # noqa: E402
from tests.engine.translators import write_translator  # noqa: E402
from tests.server.processes import KEY, ServerProcess  # noqa: E402
from tests.server.tiny import write_chat_model  # noqa: E402

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "paris", "is", "large", "."]
CONFIG = """
[service]
max_body = 200000
max_connections = 300
body_timeout = 4
write_timeout = 3
drain_timeout = 20

[engine]
backend = "reference"

[models."org/chat"]
path = "{chat}"
aliases = ["gpt-3.5-turbo"]
max_concurrent_queries = 16

[models.encoder]
path = "{encoder}"

[models.translator]
path = "{translator}"

[models.limited]
path = "{chat}"
max_context_len = 64
temperature = 0.0
max_tokens = 5
prompt_template = "short"

[prompt_templates]
short = ["{{bos}}Q: {{query}}", "A:"]
"""


def write_models(root):
    """Folders of the tiny models: chat, encoder, translator."""
    (root / "encoder").mkdir()
    (root / "translator").mkdir()
    encoder = write_case("bert", root / "encoder")
    (encoder / "vocab.txt").write_text("\n".join([*WORDS, *(f"word{i}" for i in range(203 - len(WORDS)))]) + "\n")
    return {"chat": write_chat_model(root / "chat"), "encoder": encoder,
            "translator": write_translator(root / "translator", ("__en__", "__fr__"), max_length=9)}


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory):
    """Folders of the tiny models."""
    return write_models(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def config_file(model_folders, tmp_path_factory):
    """The service's configuration file."""
    path = tmp_path_factory.mktemp("config") / "service.toml"
    path.write_text(CONFIG.format(**{name: str(folder) for name, folder in model_folders.items()}))
    return path


@pytest.fixture(scope="session")
def server(config_file):
    """The service of the session."""
    with ServerProcess("--config", str(config_file)) as process:
        yield process


@pytest.fixture(scope="session")
def http(server):
    """A plain HTTP client of the session's service."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def openai_client(server):
    """OpenAI's own client."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def model(model_folders):
    """The model of the service, loaded in this process."""
    import numflow

    with numflow.load(model_folders["chat"], backend="reference") as loaded:
        yield loaded
