"""Tiny random checkpoints in public namings, with the logits of the libraries that publish in them.

`python tests/golden/make_checkpoints.py` (needs `pip install --group parity`) rewrites
tests/golden/checkpoints. tests/models/test_checkpoints.py reads them without those libraries, and
calls `write` in `make parity`. Language models are in tests/golden/language, for
tests/models/test_language.py."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "checkpoints"
LANGUAGE = Path(__file__).parent / "language"
SIZES = {"vit": 8, "convnext": 64, "swin": 32}
WIDTHS, DEPTHS = (4, 6, 8, 10), (1, 1, 2, 1)
# grids of 16x16, 8x8 (where windows shift) and 4x4 (one window)
SWIN_DEPTHS, SWIN_HEADS = (
    (1, 2, 1),
    (1, 2, 4),
)


def images(kind: str) -> np.ndarray:
    """Returns two RGB images, normalised as a model's input."""
    return (
        np.random.default_rng(7)
        .standard_normal((2, SIZES[kind], SIZES[kind], 3))
        .astype(np.float32)
    )


def perturb(model: Any, seed: int) -> Any:
    """Moves every parameter off its initial value, so that no two tensors are alike."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * 1.5 / np.sqrt(parameter[0].numel()))
            else:
                parameter.add_(0.4 * noise)
    return model.eval()


def hugging_face_vit(kind: str) -> Any:
    import transformers

    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 12,
    }
    config = transformers.DeiTConfig if kind.startswith("DeiT") else transformers.ViTConfig
    return getattr(transformers, kind)(config(**sizes, image_size=8, patch_size=4, num_labels=3))


def hugging_face_convnext() -> Any:
    import transformers

    config = transformers.ConvNextConfig(
        hidden_sizes=list(WIDTHS), depths=list(DEPTHS), image_size=64, num_labels=3
    )
    return transformers.ConvNextForImageClassification(config)


def hugging_face_swin() -> Any:
    import transformers

    sizes = {
        "embed_dim": 4,
        "depths": list(SWIN_DEPTHS),
        "num_heads": list(SWIN_HEADS),
        "mlp_ratio": 2.0,
    }
    config = transformers.SwinConfig(
        **sizes, image_size=32, patch_size=2, window_size=4, num_labels=3
    )
    return transformers.SwinForImageClassification(config)


def timm_vit(distilled: bool) -> Any:
    from timm.models import deit, vision_transformer

    family = deit.VisionTransformerDistilled if distilled else vision_transformer.VisionTransformer
    return family(
        img_size=8, patch_size=4, embed_dim=8, depth=2, num_heads=2, mlp_ratio=1.5, num_classes=3
    )


def timm_convnext() -> Any:
    from timm.models import convnext

    return convnext.ConvNeXt(dims=WIDTHS, depths=DEPTHS, num_classes=3)


def timm_swin() -> Any:
    from timm.models import swin_transformer

    sizes = {"embed_dim": 4, "depths": SWIN_DEPTHS, "num_heads": SWIN_HEADS, "mlp_ratio": 2.0}
    return swin_transformer.SwinTransformer(
        **sizes, img_size=32, patch_size=2, window_size=4, num_classes=3
    )


def torch_encoder() -> Any:
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch_embed = nn.Module()
            self.patch_embed.proj = nn.Conv2d(3, 8, 4, stride=4)
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
            self.pos_embed = nn.Parameter(torch.zeros(1, 5, 8))
            layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=12, batch_first=True)
            self.transformer = nn.TransformerEncoder(layer, 2)
            self.mlp_head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.patch_embed.proj(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
            return self.mlp_head(self.transformer(x)[:, 0])

    return Model()


def write_augreg(path: Path, seed: int) -> Any:
    """Writes a random .npz as google-research/vision_transformer names it. timm's own reader reads
    it."""
    generator = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "cls": (1, 1, 8),
        "embedding/kernel": (4, 4, 3, 8),
        "embedding/bias": (8,),
        "Transformer/posembed_input/pos_embedding": (1, 5, 8),
        "Transformer/encoder_norm/scale": (8,),
        "Transformer/encoder_norm/bias": (8,),
        "head/kernel": (8, 3),
        "head/bias": (3,),
    }
    for k in range(2):
        block = f"Transformer/encoderblock_{k}"
        for norm in ("LayerNorm_0", "LayerNorm_2"):
            shapes |= {f"{block}/{norm}/scale": (8,), f"{block}/{norm}/bias": (8,)}
        for part in ("query", "key", "value"):
            name = f"{block}/MultiHeadDotProductAttention_1/{part}"
            shapes |= {f"{name}/kernel": (8, 2, 4), f"{name}/bias": (2, 4)}
        shapes[f"{block}/MultiHeadDotProductAttention_1/out/kernel"] = (2, 4, 8)
        shapes[f"{block}/MultiHeadDotProductAttention_1/out/bias"] = (8,)
        for j, (rows, columns) in enumerate([(8, 12), (12, 8)]):
            name = f"{block}/MlpBlock_3/Dense_{j}"
            shapes |= {f"{name}/kernel": (rows, columns), f"{name}/bias": (columns,)}
    arrays = {
        name: (name.endswith("scale") + 0.5 * generator.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    np.savez(path, **arrays)
    model = timm_vit(distilled=False)
    model.load_pretrained(str(path))
    return model.eval()


BUILDERS: dict[str, tuple[str, Callable[[], Any] | None]] = {
    "hf_vit": ("vit", lambda: hugging_face_vit("ViTForImageClassification")),
    "hf_deit": ("vit", lambda: hugging_face_vit("DeiTForImageClassification")),
    "hf_deit_teacher": ("vit", lambda: hugging_face_vit("DeiTForImageClassificationWithTeacher")),
    "hf_convnext": ("convnext", hugging_face_convnext),
    "timm_vit": ("vit", lambda: timm_vit(distilled=False)),
    "timm_vit_distilled": ("vit", lambda: timm_vit(distilled=True)),
    "timm_convnext": ("convnext", timm_convnext),
    "augreg": ("vit", None),
    "torch_encoder": ("vit", torch_encoder),
    "hf_swin": ("swin", hugging_face_swin),
    "timm_swin": ("swin", timm_swin),
}


def write(case: str, folder: Path, seed: int) -> tuple[Path, np.ndarray]:
    """Writes the checkpoint of a case. Returns its file and the publisher's logits on `images`."""
    import torch
    from safetensors.torch import save_file

    kind, build = BUILDERS[case]
    path = folder / f"{case}.{'npz' if case in ('augreg', 'torch_encoder') else 'safetensors'}"
    if build is None:
        model = write_augreg(path, seed)
    else:
        model = perturb(build(), seed)
        if case.startswith("hf"):
            model.save_pretrained(folder)
            (folder / "config.json").unlink()
            (folder / "model.safetensors").rename(path)
        elif path.suffix == ".npz":
            np.savez(path, **{name: tensor.numpy() for name, tensor in model.state_dict().items()})
        else:
            save_file(model.state_dict(), path)
    with torch.no_grad():
        logits = model(torch.from_numpy(images(kind).transpose(0, 3, 1, 2).copy()))
    return path, getattr(logits, "logits", logits).numpy()


def tokens() -> np.ndarray:
    """Returns two rows of tokens of a vocabulary of 31."""
    return np.random.default_rng(7).integers(31, size=(2, 9))


def write_language(case: str, folder: Path, seed: int) -> tuple[Path, np.ndarray]:
    """Writes "hf_gpt2" or "hf_llama" with its config.json. Returns its file and the publisher's
    logits on `tokens`."""
    import torch
    import transformers

    config: Any
    if case == "hf_gpt2":
        config = transformers.GPT2Config(
            vocab_size=31, n_positions=16, n_embd=8, n_layer=2, n_head=2, n_inner=12
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        sizes = {
            "vocab_size": 31,
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_hidden_layers": 2,
        }
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
        config = transformers.LlamaConfig(**sizes, **heads, rms_norm_eps=1e-5, rope_theta=500.0)
        model = transformers.LlamaForCausalLM(config)
    model = perturb(model, seed)
    (folder / case).mkdir(exist_ok=True, parents=True)
    model.save_pretrained(folder / case)
    (folder / case / "generation_config.json").unlink(missing_ok=True)
    with torch.no_grad():
        return folder / case / "model.safetensors", model(torch.from_numpy(tokens())).logits.numpy()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    language = {case: write_language(case, LANGUAGE, 0)[1] for case in ("hf_gpt2", "hf_llama")}
    np.savez(LANGUAGE / "logits.npz", **language)
    logits = {case: write(case, FOLDER, seed)[1] for seed, case in enumerate(BUILDERS)}
    np.savez(FOLDER / "logits.npz", **logits)
    sys.stdout.write("".join(f"{case}: {values.tolist()}\n" for case, values in logits.items()))
