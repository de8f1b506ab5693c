import subprocess
import sys

import pytest

from multitok.engines.registry import ENGINE_NAMES, create_engine, parse_engine_args
from multitok.engines.settings import EngineSettings
from multitok.tokenizer.model_files import ModelFiles


def files(**changes) -> ModelFiles:
    known = {
        "name": "m",
        "task": "generate",
        "model_path": "",
        "tokenizer_file": "",
        "chat_template": None,
        "bos_token": None,
        "eos_token": None,
        "add_bos": False,
        "eos_token_ids": [2],
        "context_length": 100,
        "vocab_size": 50,
    }
    return ModelFiles(**(known | changes))


def make(name, **settings):
    return create_engine(name, EngineSettings(**settings))


def test_engine_args_are_split_at_the_first_equals_sign():
    assert parse_engine_args(["a=1", "b=x=y"]) == {"a": "1", "b": "x=y"}
    assert parse_engine_args([]) == {}


@pytest.mark.parametrize("argument", ["a", "=1", "a=", ""])
def test_other_engine_args_are_refused(argument):
    with pytest.raises(ValueError, match="KEY=VALUE"):
        parse_engine_args([argument])


def test_an_engine_arg_may_come_once():
    with pytest.raises(ValueError, match="'a' is given twice"):
        parse_engine_args(["a=1", "a=2"])


def test_options_after_the_dashes_are_refused_by_an_engine_that_has_none():
    with pytest.raises(ValueError, match="takes no options after --, but --engine-arg"):
        make("simulated", files=files(), command_line=["--tensor-parallel-size", "2"])


def test_an_unknown_engine_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="there are: openvino, remote, simulated"):
        make("nothing", files=files())
    assert ENGINE_NAMES == ("openvino", "remote", "simulated")


def test_the_simulated_engine_plays_the_model():
    engine = make("simulated", files=files(), max_running_requests=7, context_length=50)
    info = engine.info
    assert (info.simulated, info.context_length, info.vocab_size, info.max_running_requests) == (True, 50, 50, 7)
    assert make("simulated", files=files(task="embed")).info.task == "embed"


def test_a_context_above_the_models_or_unknown_is_refused():
    with pytest.raises(ValueError, match="above the model's 100"):
        make("simulated", files=files(), context_length=101)
    with pytest.raises(ValueError, match="--context-length"):
        make("openvino", files=files(context_length=None, model_path="model.gguf"))
    # A tokenizer alone doesn't say; what simulates a model needs no one to say it.
    assert make("simulated", files=files(context_length=None)).info.context_length == 131072
    assert make("simulated", files=files(context_length=None), context_length=9)


def test_openvino_needs_a_model():
    with pytest.raises(ValueError, match="needs a model"):
        make("openvino", files=files())


def test_a_folder_of_other_weights_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="optimum-cli export openvino"):
        make("openvino", files=files(model_path=str(tmp_path)))


@pytest.mark.real_engine
def test_openvino_loads_by_task(smollm2_file, minilm_folder):
    text = files(model_path=str(smollm2_file), vocab_size=49152, context_length=8192)
    engine = make("openvino", files=text, options={"kv_cache_tokens": "256"})
    assert (engine.info.task, engine.info.context_length) == ("generate", 256)
    assert engine.info.resumable == []
    engine.shutdown()
    engine = make("openvino", files=text, options={"kv_cache_tokens": "256"}, resume=True)
    assert "repetition_penalty" in engine.info.resumable
    engine.shutdown()
    encoder = make("openvino", files=files(task="embed", model_path=str(minilm_folder)))
    assert encoder.info.task == "embed"
    encoder.shutdown()


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


def test_the_simulated_engine_imports_no_openvino():
    code = "import sys, multitok.engines.registry, multitok.engines.simulated; print('openvino' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_openvino_sends_no_telemetry(minilm_folder):
    """Nothing of the telemetry package is loaded, no thread starts, and no socket is even made."""
    code = f"""
import sys, threading
def hook(event, args):
    if event.startswith("socket."):
        print("SOCKET", event, args)
sys.addaudithook(hook)
import multitok.engines.openvino_llm
from multitok.engines.openvino_encoder import OpenVINOEncoder
OpenVINOEncoder({str(minilm_folder)!r}, {{}}).shutdown()
loaded = [name for name, module in sys.modules.items() if "openvino_telemetry" in name and module is not None]
print(loaded, threading.active_count())
"""
    assert run_python(code).strip() == "[] 1"
