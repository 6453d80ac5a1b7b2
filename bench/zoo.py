"""Models of Hugging Face that no lever was made for, small and with random weights.

`python -m bench cpu --zoo` times them; each takes one tensor and gives one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from bench.models import Args, Case, Returns, case, noise, tokens, trained_looking

_HEADS = {"num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 8000}
_TEXT = {**_HEADS, "hidden_size": 256, "intermediate_size": 1024}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_GPT = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 8000}
_T5 = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4}
_IMAGE = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4,
          "num_attention_heads": 3}  # fmt: skip
_AUDIO = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
          "num_attention_heads": 4}  # fmt: skip
_READ, _SEEN, _HEARD = tokens(1, 64, 8000), noise((1, 3, 224, 224)), noise((1, 16000))


def _of(
    name: str, make: Callable[[int], Args], field: str = "last_hidden_state", **given: Any
) -> Callable[[], Case]:
    """The architecture of that name, such as "BertModel"; `given` is its configuration."""

    def model() -> nn.Module:
        import transformers

        made = getattr(transformers, name)
        return trained_looking(Returns(made(made.config_class(**given)), field))

    return case(model, make, 1e-4)


ZOO: dict[str, Callable[[], Case]] = {
    # encoders of text
    "albert": _of("AlbertModel", _READ, **_TEXT, embedding_size=128),
    "deberta": _of("DebertaV2Model", _READ, **_TEXT),
    "distilbert": _of(
        "DistilBertModel", _READ, dim=256, hidden_dim=1024, n_layers=4, n_heads=4, vocab_size=8000
    ),
    "electra": _of("ElectraModel", _READ, **_TEXT),
    "fnet": _of(
        "FNetModel", _READ, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
        vocab_size=8000,
    ),
    "modernbert": _of("ModernBertModel", _READ, **_TEXT, pad_token_id=0),
    "mpnet": _of("MPNetModel", _READ, **_TEXT),
    "t5_encoder": _of("T5EncoderModel", _READ, **_T5, vocab_size=8000),
    # decoders, a prompt at once
    "bloom": _of("BloomModel", _READ, hidden_size=256, n_layer=4, n_head=4, vocab_size=8000,
                 use_cache=False),
    "falcon": _of("FalconModel", _READ, **_HEADS, hidden_size=256, use_cache=False),
    "gemma3": _of("Gemma3TextModel", _READ, **_GROUPED, head_dim=64, use_cache=False),
    "gpt_neox": _of("GPTNeoXModel", _READ, **_TEXT, use_cache=False),
    "llama": _of("LlamaModel", _READ, **_GROUPED, use_cache=False),
    "mamba": _of("MambaModel", _READ, hidden_size=128, num_hidden_layers=2, vocab_size=8000,
                 use_cache=False),
    "opt": _of("OPTModel", _READ, hidden_size=256, ffn_dim=1024, num_hidden_layers=4,
               num_attention_heads=4, vocab_size=8000, word_embed_proj_dim=256, use_cache=False),
    "phi": _of("PhiModel", _READ, **_TEXT, use_cache=False),
    "qwen3": _of("Qwen3Model", _READ, **_GROUPED, head_dim=64, use_cache=False),
    # images
    "beit": _of("BeitModel", _SEEN, **_IMAGE),
    "clip_vision": _of("CLIPVisionModel", _SEEN, **_IMAGE),
    "convnext": _of("ConvNextModel", _SEEN, depths=[2, 2, 4, 2], hidden_sizes=[48, 96, 192, 384]),
    "dinov2": _of("Dinov2Model", _SEEN, hidden_size=192, num_hidden_layers=4,
                  num_attention_heads=3),
    "efficientnet": _of("EfficientNetModel", _SEEN, image_size=224, width_coefficient=1.0,
                        depth_coefficient=1.0, hidden_dim=1280),
    "focalnet": _of("FocalNetModel", _SEEN, embed_dim=48, depths=[2, 2, 2, 2]),
    "levit": _of("LevitModel", _SEEN),
    "mobilenet_v2": _of("MobileNetV2Model", _SEEN),
    "mobilevit": _of("MobileViTModel", _SEEN),
    "poolformer": _of("PoolFormerModel", _SEEN),
    "pvt": _of("PvtV2Model", _SEEN),
    "regnet": _of("RegNetModel", _SEEN, hidden_sizes=[32, 64, 160, 384], groups_width=16,
                  depths=[2, 4, 6, 2]),
    "segformer": _of("SegformerModel", _SEEN),
    "swin": _of("SwinModel", _SEEN, embed_dim=48, depths=[2, 2, 2, 2]),
    "swin2": _of("Swinv2Model", _SEEN, embed_dim=48, depths=[2, 2, 2, 2]),
    # sound, and series of numbers
    "ast": _of("ASTModel", noise((1, 512, 128)), **_AUDIO, max_length=512),
    "patchtst": _of("PatchTSTModel", noise((1, 256, 4)), context_length=256,
                    num_input_channels=4, patch_length=16, patch_stride=16),
    "wav2vec2": _of("Wav2Vec2Model", _HEARD, **_AUDIO),
}  # fmt: skip
