import json
import shutil
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from conformance import Driver, pack
from tiny_onnx import write_lookup_model

from multitok.engines.base import EngineRefusal
from multitok.engines.encoder_layout import POOLINGS, read_encoder_layout
from multitok.engines.openvino_bert import build_bert
from multitok.engines.openvino_encoder import OpenVINOEncoder, pool
from multitok.messages.base import FinishReason
from multitok.messages.sampling import SamplingParams

PARAMS = SamplingParams(max_new_tokens=1)
REFERENCE = json.loads((Path(__file__).parent / "data" / "minilm_reference.json").read_text())


@pytest.fixture(scope="module")
def minilm(minilm_folder):
    engine = OpenVINOEncoder(minilm_folder, {})
    yield engine
    engine.shutdown()


def vectors(engine, inputs) -> list[np.ndarray]:
    results = Driver(engine).run(*((ids, PARAMS) for ids in inputs))
    assert all(result.finish == FinishReason("stop") and result.ids == [] for result in results)
    return [np.frombuffer(result.embedding, dtype=np.float32) for result in results]


def small_encoder(folder: Path, **files: object) -> Path:
    """A folder whose ONNX model looks up one vector of three numbers per id."""
    write_lookup_model(folder / "onnx" / "model.onnx", TABLE)
    config = {"model_type": "bert", "vocab_size": len(TABLE), "max_position_embeddings": 8, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_json", ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


TABLE = np.array([[9, 9, 9], [1, 2, 3], [3, 2, 1], [0, 4, 0], [-1, 0, 1]], dtype=np.float32)
TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}


@pytest.mark.real_engine
class TestMiniLM:
    def test_info(self, minilm):
        info = minilm.info
        assert (info.task, info.embedding_size, info.context_length, info.vocab_size) == ("embed", 384, 256, 30522)

    def test_vectors_are_those_of_sentence_transformers(self, minilm):
        rows = REFERENCE["rows"]
        for row, vector in zip(rows, vectors(minilm, [row["ids"] for row in rows]), strict=True):
            assert vector @ np.array(row["vector"]) >= 0.9999, row["text"]
            assert np.abs(vector - row["vector"]).max() < 1e-4, row["text"]
            assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)

    def test_a_vector_hardly_depends_on_what_is_beside_it(self, minilm):
        inputs = [row["ids"] for row in REFERENCE["rows"]]
        together = vectors(minilm, inputs)
        alone = [vectors(minilm, [ids])[0] for ids in inputs]
        assert all(np.abs(a - b).max() < 1e-5 for a, b in zip(together, alone, strict=True))

    def test_many_requests_come_in_order_in_batches_of_bounded_size(self, minilm):
        driver = Driver(minilm)
        numbers = [driver.add([101, 1000 + i, 102] + [2000] * (i % 50), PARAMS) for i in range(200)]
        seen = []
        while minilm.has_unfinished():
            outputs = driver.step()
            longest = max(3 + (number - numbers[0]) % 50 for number in (output.number for output in outputs))
            assert len(outputs) * longest <= 1024
            seen += [output.number for output in outputs]
        assert seen == numbers

    def test_aborted_requests_get_no_output(self, minilm):
        driver = Driver(minilm)
        first, second = (driver.add([101, 2000 + i, 102], PARAMS) for i in range(2))
        driver.abort(first)
        driver.until_idle()
        assert driver.results[second].embedding
        minilm.abort(second)
        assert minilm.step() == []

    @pytest.mark.parametrize(
        ("ids", "words"), [([], "no tokens"), ([30522], "from 0 to"), ([-1], "from 0 to"), ([101] * 257, "256")]
    )
    def test_bad_inputs_are_refused(self, minilm, ids, words):
        with pytest.raises(EngineRefusal, match=words) as refusal:
            minilm.add_request(1, pack(ids), PARAMS)
        assert refusal.value.status == 400
        assert not minilm.has_unfinished()

    def test_a_number_in_use_is_not_taken_twice(self, minilm):
        minilm.add_request(1, pack([101, 102]), PARAMS)
        with pytest.raises(ValueError, match="already"):
            minilm.add_request(1, pack([101, 102]), PARAMS)
        minilm.abort(1)

    def test_ir_gives_the_same_vectors_and_comes_first(self, minilm, minilm_folder, tmp_path):
        for name in ("config.json", "modules.json", "sentence_bert_config.json"):
            shutil.copy(minilm_folder / name, tmp_path)
        shutil.copytree(minilm_folder / "1_Pooling", tmp_path / "1_Pooling")
        (tmp_path / "model.safetensors").symlink_to(minilm_folder / "model.safetensors")
        config = json.loads((minilm_folder / "config.json").read_text())
        (tmp_path / "openvino").mkdir()
        model = build_bert(minilm_folder / "model.safetensors", config)
        ov.save_model(model, tmp_path / "openvino" / "openvino_model.xml", compress_to_fp16=False)
        assert read_encoder_layout(tmp_path).model_format == "openvino"
        assert read_encoder_layout(tmp_path, "safetensors").model_format == "safetensors"
        engine = OpenVINOEncoder(tmp_path, {"batch_tokens": "64"})
        inputs = [row["ids"] for row in REFERENCE["rows"]]
        for ours, theirs in zip(vectors(engine, inputs), vectors(minilm, inputs), strict=True):
            assert np.abs(ours - theirs).max() < 1e-5


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("mean", [2, 2, 2]),
        ("cls", [1, 2, 3]),
        ("max", [3, 2, 3]),
        ("lasttoken", [3, 2, 1]),
        ("mean_sqrt_len_tokens", [2 * 2**0.5] * 3),
    ],
)
def test_poolings_leave_padding_out(tmp_path, mode, expected):
    folder = small_encoder(tmp_path, modules_json=[TRANSFORMER, POOLING], _1_Pooling__config_json={})
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
    engine = OpenVINOEncoder(folder, {})
    short, long = vectors(engine, [[1, 2], [3, 3, 3, 3, 3]])
    assert short == pytest.approx(np.array(expected))
    assert long == pytest.approx(pool(TABLE[[[3] * 5]], np.ones((1, 5), dtype=np.int64), mode)[0])
    assert engine.info.embedding_size == 3


def test_normalize_makes_unit_vectors_also_of_zero(tmp_path):
    folder = small_encoder(tmp_path, modules_json=[TRANSFORMER, POOLING, NORMALIZE])
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (unit,) = vectors(OpenVINOEncoder(folder, {}), [[3]])
    assert unit == pytest.approx(np.array([0, 1, 0]))


def test_without_modules_it_is_the_mean_as_it_is(tmp_path):
    layout = read_encoder_layout(small_encoder(tmp_path))
    assert (layout.pooling, layout.normalize, layout.model_format) == ("mean", False, "onnx")


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True},
            "max and cls|cls and",
        ),
        ([TRANSFORMER, POOLING], {"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        ([TRANSFORMER, POOLING], {}, "none"),
        ([TRANSFORMER], {}, "no pooling"),
        ([TRANSFORMER, POOLING, {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}], {}, "Dense|none"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, modules, pooling, words):
    folder = small_encoder(tmp_path, modules_json=modules)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(ValueError, match=words):
        OpenVINOEncoder(folder, {})


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 8),
        ({"sentence_bert_config_json": {"max_seq_length": 5}}, 5),
        ({"sentence_bert_config_json": {"max_seq_length": None}, "tokenizer_config_json": {"model_max_length": 6}}, 6),
        ({"tokenizer_config_json": {"model_max_length": 10**30}}, 8),
        ({"config_json": {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}}, 512),
    ],
)
def test_the_longest_input_is_the_smallest_limit_that_the_files_name(tmp_path, files, limit):
    assert read_encoder_layout(small_encoder(tmp_path, **files)).context_length == limit


def test_a_context_length_may_be_shorter_but_not_longer(tmp_path):
    folder = small_encoder(tmp_path)
    assert OpenVINOEncoder(folder, {}, context_length=4).info.context_length == 4
    with pytest.raises(ValueError, match="above the model's 8"):
        OpenVINOEncoder(folder, {}, context_length=9)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        OpenVINOEncoder(tmp_path, {})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        OpenVINOEncoder(tmp_path, {})
    (tmp_path / "config.json").write_text('{"model_type": "t5", "vocab_size": 9, "max_position_embeddings": 8}')
    with pytest.raises(ValueError, match="no model: looked for"):
        OpenVINOEncoder(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="'t5' needs an onnx/ or openvino/ folder"):
        OpenVINOEncoder(tmp_path, {})
    with pytest.raises(ValueError, match="can't be read"):
        build_bert(tmp_path / "model.safetensors", {"model_type": "bert"})
    (tmp_path / "model.onnx").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="can't load"):
        OpenVINOEncoder(tmp_path, {})


def test_wrong_options_are_refused_by_name(tmp_path):
    for options, words in (({"kv_cache_gb": "1"}, "no option kv_cache_gb"), ({"format": "torch"}, "must be one of")):
        with pytest.raises(ValueError, match=words):
            OpenVINOEncoder(small_encoder(tmp_path), options)


def test_every_pooling_is_known_to_the_test_above():
    assert set(POOLINGS) == {"mean", "cls", "max", "lasttoken", "mean_sqrt_len_tokens"}
