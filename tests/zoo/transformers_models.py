"""Models of transformers, built small from a configuration."""

from typing import Any

from torch import Tensor, nn

from tests.support.torchvision_import import make_importable
from tests.zoo.cases import Case, Wrapped, numbers, pictures, tokens

make_importable()

import transformers  # noqa: E402

BERT: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 24,
    "num_labels": 3,
}
"""Names that most encoders share."""

LLAMA: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Names that most decoders share."""

PICTURE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 3,
}

SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 24,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 24,
}


def model(name: str, head: str, options: dict[str, Any]) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**options)
    made: nn.Module = getattr(transformers, f"{name}{head}")(config)
    return made


def text(name: str, head: str, refused: str = "", output: str = "logits", **options: Any) -> Case:
    """A model that takes token numbers alone."""
    return Case(lambda n: Wrapped(model(name, head, options), "input_ids", output), tokens, refused)


def seen(
    name: str, head: str = "ForImageClassification", output: str = "logits", size: int = 32, **options: Any
) -> Case:
    """A model that takes pictures."""
    return Case(lambda n: Wrapped(model(name, head, options), "pixel_values", output), lambda: pictures(size))


def pair(name: str, length: int = 9, **options: Any) -> Case:
    """An encoder and a decoder, which get the same tokens."""
    head = "ForConditionalGeneration"
    return Case(
        lambda n: Wrapped(model(name, head, options), "input_ids", "logits", ["decoder_input_ids"], use_cache=False),
        lambda: tokens(length),
    )


class Speech(nn.Module):
    """Sound to classes."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.model = model(name, "ForSequenceClassification", options)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


class Series(nn.Module):
    """The past of a series to what comes."""

    def __init__(self, name: str, head: str, output: str, **options: Any) -> None:
        super().__init__()
        self.model, self.output = model(name, head, options), output

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.model(past_values=x), self.output)


SOUND: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": (8, 8),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "num_labels": 3,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}

CLS = "ForSequenceClassification"
LM = "ForCausalLM"

CASES: dict[str, Case] = {
    "BERT": text("Bert", CLS, **BERT),
    "BERT, masked language": text("Bert", "ForMaskedLM", **BERT),
    "RoBERTa": text("Roberta", CLS, **BERT),
    "XLM-RoBERTa": text("XLMRoberta", CLS, **BERT),
    "DistilBERT": text(
        "DistilBert",
        CLS,
        vocab_size=24,
        dim=16,
        n_layers=2,
        n_heads=2,
        hidden_dim=24,
        max_position_embeddings=24,
        num_labels=3,
    ),
    "ELECTRA": text("Electra", CLS, **BERT, embedding_size=8),
    "ALBERT, shared layers": text("Albert", CLS, **BERT, embedding_size=8),
    "MPNet": text("MPNet", CLS, **BERT),
    "DeBERTa": text(
        "Deberta", CLS, **BERT, relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=24
    ),
    "DeBERTa-v2": text(
        "DebertaV2",
        CLS,
        **BERT,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=8,
        norm_rel_ebd="layer_norm",
    ),
    "ModernBERT": text(
        "ModernBert",
        CLS,
        **{**BERT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
        global_attn_every_n_layers=2,
        local_attention=4,
    ),
    "Longformer": text("Longformer", CLS, **BERT, attention_window=[4, 4]),
    "BigBird": text("BigBird", CLS, **BERT, attention_type="original_full"),
    "Funnel": text(
        "Funnel", CLS, vocab_size=24, block_sizes=[1, 1], d_model=16, n_head=2, d_head=8, d_inner=24, num_labels=3
    ),
    "RoFormer": text("RoFormer", CLS, **BERT),
    "FNet": text("FNet", CLS, **{k: v for k, v in BERT.items() if k != "num_attention_heads"}),
    "ConvBERT": text("ConvBert", CLS, **{**BERT, "num_attention_heads": 4}, embedding_size=16, conv_kernel_size=3),
    "SqueezeBERT": text("SqueezeBert", CLS, **BERT, embedding_size=16),
    "I-BERT": text("IBert", CLS, **BERT),
    "XLNet": text("XLNet", CLS, vocab_size=24, d_model=16, n_layer=2, n_head=2, d_inner=24, num_labels=3),
    "Nystromformer": text("Nystromformer", CLS, **BERT, num_landmarks=3, segment_means_seq_len=9),
    "YOSO": text("Yoso", CLS, **BERT, use_expectation=True),
    "GPT-2": text(
        "GPT2",
        "LMHeadModel",
        vocab_size=24,
        n_positions=24,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "GPT-Neo": text(
        "GPTNeo",
        LM,
        vocab_size=24,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=24,
        intermediate_size=24,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "GPT-NeoX": text("GPTNeoX", LM, **{k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}),
    "GPT-J": text(
        "GPTJ",
        LM,
        vocab_size=24,
        n_positions=24,
        n_embd=16,
        n_layer=2,
        n_head=2,
        rotary_dim=4,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "OPT": text(
        "OPT",
        LM,
        vocab_size=24,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=24,
        max_position_embeddings=24,
        word_embed_proj_dim=16,
        layerdrop=0.0,
    ),
    "BLOOM": text("Bloom", LM, vocab_size=24, hidden_size=16, n_layer=2, n_head=2, use_cache=False),
    "Falcon": text("Falcon", LM, vocab_size=24, hidden_size=16, num_hidden_layers=2, num_attention_heads=2),
    "Llama": text("Llama", LM, **LLAMA),
    "Llama, dynamic rotary scaling": text(
        "Llama", LM, **{**LLAMA, "max_position_embeddings": 4}, rope_scaling={"rope_type": "dynamic", "factor": 2.0}
    ),
    "Mistral": text("Mistral", LM, **LLAMA, sliding_window=4),
    "Mixtral": text("Mixtral", LM, **LLAMA, num_local_experts=3, num_experts_per_tok=2, experts_implementation="eager"),
    "Qwen2": text("Qwen2", LM, **LLAMA),
    "Qwen3": text("Qwen3", LM, **LLAMA, head_dim=8),
    "Gemma": text("Gemma", LM, **LLAMA, head_dim=8),
    "Gemma 2": text("Gemma2", LM, **LLAMA, head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    "Phi": text("Phi", LM, **LLAMA),
    "Phi-3": text("Phi3", LM, **LLAMA),
    "StableLM": text("StableLm", LM, **LLAMA),
    "OLMo": text("Olmo", LM, **LLAMA),
    "Cohere": text("Cohere", LM, **LLAMA),
    "Starcoder2": text("Starcoder2", LM, **LLAMA),
    "Mamba": text("Mamba", LM, vocab_size=24, hidden_size=16, state_size=4, num_hidden_layers=2, use_cache=False),
    "Mamba-2": text(
        "Mamba2",
        LM,
        vocab_size=24,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=8,
        n_groups=1,
        chunk_size=4,
        use_cache=False,
    ),
    "RWKV": text("Rwkv", LM, vocab_size=24, hidden_size=16, num_hidden_layers=2, use_cache=False),
    "T5": pair("T5", vocab_size=24, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2),
    "mT5": pair("MT5", vocab_size=24, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2),
    "BART": pair("Bart", **SEQ2SEQ),
    "Pegasus": pair("Pegasus", **SEQ2SEQ),
    "mBART": pair("MBart", **SEQ2SEQ),
    "LED": pair(
        "LED",
        **{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"},
        length=8,  # whole windows: where it pads, its gradients are NaN, alone too
        attention_window=4,
        max_encoder_position_embeddings=24,
        max_decoder_position_embeddings=24,
    ),
    "ViT": seen("ViT", **PICTURE),
    "DeiT": seen("DeiT", **PICTURE),
    "BEiT": seen("Beit", **PICTURE, use_relative_position_bias=True),
    "DINOv2": seen("Dinov2", **{k: v for k, v in PICTURE.items() if k != "intermediate_size"}),
    "Swin": seen(
        "Swin",
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        window_size=4,
        num_labels=3,
        drop_path_rate=0.0,
    ),
    "ConvNeXt": seen("ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3),
    "ResNet": seen("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3),
    "RegNet": seen("RegNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=8, num_labels=3),
    "SegFormer": seen(
        "Segformer",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        num_labels=3,
        drop_path_rate=0.0,
    ),
    "CLIP, text": text(
        "CLIPText",
        "Model",
        output="pooler_output",
        **{k: v for k, v in BERT.items() if k != "num_labels"},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "CLIP, pictures": seen(
        "CLIPVision", "Model", "pooler_output", **{k: v for k, v in PICTURE.items() if k != "num_labels"}
    ),
    "SigLIP, pictures": seen(
        "SiglipVision", "Model", "pooler_output", **{k: v for k, v in PICTURE.items() if k != "num_labels"}
    ),
    "wav2vec 2.0": Case(lambda n: Speech("Wav2Vec2", **SOUND), lambda: numbers(2, 400)),
    "HuBERT": Case(lambda n: Speech("Hubert", **SOUND), lambda: numbers(2, 400)),
    "WavLM": Case(lambda n: Speech("WavLM", **SOUND, num_buckets=8), lambda: numbers(2, 400)),
    "Audio Spectrogram Transformer": Case(
        lambda n: Wrapped(
            model(
                "AST",
                "ForAudioClassification",
                {**{k: v for k, v in PICTURE.items() if k != "image_size"}, "num_mel_bins": 16, "max_length": 24},
            ),
            "input_values",
            "logits",
        ),
        lambda: numbers(2, 24, 16),
    ),
    "PatchTST": Case(
        lambda n: Series(
            "PatchTST",
            "ForPrediction",
            "prediction_outputs",
            num_input_channels=2,
            context_length=16,
            patch_length=4,
            patch_stride=4,
            d_model=16,
            num_attention_heads=2,
            num_hidden_layers=2,
            ffn_dim=24,
            prediction_length=4,
            loss="mse",
        ),
        lambda: numbers(3, 16, 2),
    ),
    "PatchTSMixer": Case(
        lambda n: Series(
            "PatchTSMixer",
            "ForPrediction",
            "prediction_outputs",
            num_input_channels=2,
            context_length=16,
            patch_length=4,
            patch_stride=4,
            d_model=8,
            num_layers=2,
            prediction_length=4,
            loss="mse",
        ),
        lambda: numbers(3, 16, 2),
    ),
}
