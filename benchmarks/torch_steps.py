"""The networks of `bench_steps` in PyTorch, and their steps: plain, and private by Opacus in three modes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from opacus import GradSampleModule, PrivacyEngine
from opacus.optimizers import DPOptimizer
from torch import nn

CLASSES, VOCABULARY, LENGTH, WIDTH, DEPTH, HEADS = 10, 4096, 128, 256, 4, 4


class Attention(nn.Module):
    """Self-attention by four linear layers, which Opacus can clip."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        self.heads, self.causal = heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = (part(x).view(b, t, self.heads, -1).transpose(1, 2) for part in self.parts[:3])
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.parts[3](out.transpose(1, 2).reshape(b, t, w))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class ViT(nn.Module):
    """The small vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 4, 4)
        self.places = nn.Embedding(64, 192)
        self.blocks = nn.Sequential(*[Block(192, 3, False) for _ in range(6)])
        self.norm, self.head = nn.LayerNorm(192), nn.Linear(192, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        places = self.places(torch.arange(64).expand(len(x), -1).contiguous())
        return self.head(self.norm(self.blocks(x + places)).mean(1))


class Language(nn.Module):
    """A causal transformer. Opacus does not clip a shared embedding, so the output layer is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block(WIDTH, HEADS, True) for _ in range(DEPTH)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.places(torch.arange(LENGTH).expand(len(x), -1).contiguous())
        return self.head(self.norm(self.blocks(self.embedding(x) + places)))


class Residual(nn.Module):
    """A block of ResNet-20 with GroupNorm."""

    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
        )
        self.norms = nn.ModuleList([nn.GroupNorm(8, width), nn.GroupNorm(8, width)])
        self.pad, self.stride = width - before, stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norms[0](self.one(x)))
        short = nn.functional.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.pad))
        return torch.relu(self.norms[1](self.two(y)) + short)


def network(name: str) -> nn.Module:
    """Returns the network of a case."""
    if name == "mlp":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES)
        )
    if name == "cnn":
        return nn.Sequential(
            nn.ZeroPad2d((2, 3, 2, 3)),
            nn.Conv2d(1, 16, 8, 2),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, 2),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Flatten(),
            nn.LazyLinear(32),
            nn.ReLU(),
            nn.Linear(32, CLASSES),
        )
    if name == "resnet20":
        widths = [16] * 3 + [32] * 3 + [64] * 3
        blocks = [
            Residual(before, width, 1 + (before < width)) for before, width in zip([16, *widths], widths, strict=False)
        ]
        stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()]
        return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))
    return ViT() if name == "vit" else Language()


def steps(name: str, size: int, clip_norm: float, noise_multiplier: float) -> dict[str, Callable[[], Any]]:
    """Returns the steps of a case on one fixed batch."""
    if name == "lm":
        tokens = torch.randint(VOCABULARY, (size, LENGTH + 1))
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
    else:
        shape = (1, 28, 28) if name in ("mlp", "cnn") else (3, 32, 32)
        inputs, labels = torch.rand(size, *shape), torch.from_numpy(np.arange(size) % CLASSES)

    def made() -> Any:
        torch.manual_seed(0)
        model = network(name)
        with torch.no_grad():
            model(inputs)
        return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def plain() -> Callable[[], Any]:
        model, optimizer = made()
        criterion = nn.CrossEntropyLoss()

        def step() -> None:
            optimizer.zero_grad()
            logits = model(inputs)
            criterion(logits.flatten(0, -2), labels.flatten()).backward()
            optimizer.step()

        return step

    def hooks(functorch: bool) -> Callable[[], Any]:
        model, optimizer = made()
        wrapped = GradSampleModule(model, force_functorch=functorch)
        private = DPOptimizer(
            optimizer, noise_multiplier=noise_multiplier, max_grad_norm=clip_norm, expected_batch_size=size
        )

        def step() -> None:
            private.zero_grad()
            logits = wrapped(inputs)
            losses = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
            losses.view(size, -1).mean(1).mean().backward()
            private.step()

        return step

    def ghost() -> Callable[[], Any]:
        model, optimizer = made()
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=size)
        wrapped, private, criterion, _ = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=clip_norm,
            criterion=nn.CrossEntropyLoss(),
            poisson_sampling=False,
            grad_sample_mode="ghost",
        )

        def step() -> None:
            private.zero_grad()
            logits = wrapped(inputs)
            if name == "lm":
                criterion(logits.transpose(1, 2), labels).backward()
            else:
                criterion(logits, labels).backward()
            private.step()

        return step

    found = {"torch plain": plain(), "Opacus hooks": hooks(False), "Opacus functorch": hooks(True)}
    if name != "lm":
        found["Opacus ghost"] = ghost()
    return found
