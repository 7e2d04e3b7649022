"""The table of encoders, keyed by their names in configurations."""

from __future__ import annotations

from fedshot.data.encoders.frozen import EncoderOptions
from fedshot.data.encoders.module import ModuleEncoder
from fedshot.data.encoders.sentences import SentenceTransformersEncoder
from fedshot.data.encoders.timm_models import TimmEncoder
from fedshot.data.encoders.transformers_models import TransformersEncoder

ENCODERS: dict[str, type[EncoderOptions]] = {
    "module": ModuleEncoder,
    "sentence_transformers": SentenceTransformersEncoder,
    "timm": TimmEncoder,
    "transformers": TransformersEncoder,
}
