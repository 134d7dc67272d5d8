"""traces/configs/config_classes.inc, a table kept by hand: each default and alias in it equals that
of the configuration class of transformers 5.20.2. Exit status 77: that release is missing.

    python3 tests/configs/config_classes_test.py       exit 1 and a line for each wrong entry

A new class is a new row: its model_type, then key=default, key~name_in_files, path@text_type.
Not compared: patterns of layer types, architectures, and the classes that only vLLM has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parents[2] / "traces/configs/config_classes.inc"
RELEASE = "5.20.2"
# Their rows are of the classes that vLLM 0.33.0 defines in their place.
OF_VLLM = {"bailing_hybrid", "beam", "deepseek_v32", "inkling_mm_model", "kimi_linear",
           "minimax_m3_vl", "qwen3_asr", "ultrabert", "unlimited_ocr"}  # fmt: skip


def rows() -> dict[str, list[str]]:
    """The words of each class, by its model_type."""
    table: dict[str, list[str]] = {}
    for word in TABLE.read_text(encoding="utf-8").split("(", 1)[1].rsplit(")", 1)[0].split():
        if not any(sign in word for sign in "=~@"):
            words = table.setdefault(word, [])
        else:
            words.append(word)
    return table


def value_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def wrong_words(words: list[str], config: Any) -> list[str]:
    """The entries that the configuration class does not have, each with its own value."""
    wrong = []
    for word in words:
        sign = min((word.index(s), s) for s in "=~@" if s in word)[1]
        key, given = word.split(sign, 1)
        if sign == "@":
            part = config
            for name in key.split("."):
                part = getattr(part, name, None)
            own = getattr(part, "model_type", "")
        elif sign == "~":
            own = type(config).attribute_map.get(key, "")
        elif key in ("arch", "layer_types"):
            continue
        else:
            name = type(config).attribute_map.get(key, key)
            own = value_text(getattr(type(config), name, config.__dict__.get(name)))
        if own != given:
            wrong.append(f"{word}: the class has {own!r}")
    return wrong


def main() -> int:
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        print("transformers is missing")
        return 77
    if transformers.__version__ != RELEASE:
        print(f"transformers {transformers.__version__}; the table is of {RELEASE}")
        return 77
    wrong, compared = [], 0
    for model_type, words in rows().items():
        if model_type not in CONFIG_MAPPING or model_type in OF_VLLM:
            continue
        compared += 1
        wrong += [f"{model_type}: {w}" for w in wrong_words(words, CONFIG_MAPPING[model_type]())]
    print("\n".join([*wrong, f"{compared} of {len(rows())} classes compared, {len(wrong)} wrong"]))
    return 1 if wrong or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
