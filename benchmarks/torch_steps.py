"""The networks of `problems.cases` in PyTorch, and their steps: plain, and private by Opacus in
three modes.

They run on a GPU where PyTorch finds one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from opacus import GradSampleModule, PrivacyEngine
from opacus.optimizers import DPOptimizer
from torch import nn

from benchmarks.problems import CLASSES, DEPTH, HEADS, LENGTH, VOCABULARY, WIDTH

Maker = Callable[[], tuple[Callable[[], Any], float | None]]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """Places, blocks, a norm and a head."""

    def __init__(self, length: int, width: int, depth: int, heads: int, outputs: int, causal: bool):
        super().__init__()
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads, causal) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs, bias=not causal)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(x.shape[1], device=x.device).expand(len(x), -1).contiguous()
        return self.norm(self.blocks(x + self.places(numbers)))


class ViT(Transformer):
    """A vision transformer. The defaults are the small one."""

    def __init__(
        self, side: int = 32, patch: int = 4, width: int = 192, depth: int = 6, heads: int = 3
    ):
        outputs = 1000 if side > 32 else CLASSES
        super().__init__((side // patch) ** 2, width, depth, heads, outputs, causal=False)
        self.patches = nn.Conv2d(3, width, patch, patch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.normed(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class Language(Transformer):
    """A causal transformer. Opacus does not clip a shared embedding, so the output layer is its
    own."""

    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        length: int = LENGTH,
        width: int = WIDTH,
        depth: int = DEPTH,
        heads: int = HEADS,
    ):
        super().__init__(length, width, depth, heads, vocabulary, causal=True)
        self.embedding = nn.Embedding(vocabulary, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.normed(self.embedding(x)))


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


class LoRA(nn.Module):
    """A frozen layer and two trained factors."""

    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def with_lora(model: nn.Module, rank: int) -> nn.Module:
    """Freezes a model and adds factors to the queries and values."""
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Attention):
            for k in (0, 2):
                module.parts[k] = LoRA(module.parts[k], rank)
    return model


def resnet(width: int, blocks: int) -> nn.Module:
    """Returns a ResNet of three groups of blocks, whose first has 16 * width channels."""
    layers = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()]
    before = 16
    for number in range(3 * blocks):
        after = 16 * width * 2 ** (number // blocks)
        layers.append(Residual(before, after, 2 if number in (blocks, 2 * blocks) else 1))
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


def network(name: str) -> nn.Module:
    """Returns the network of a case."""
    if name == "mlp":
        layers = [nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(512, CLASSES))
    if name == "cnn":
        first = [nn.ZeroPad2d((2, 3, 2, 3)), nn.Conv2d(1, 16, 8, 2), nn.ReLU(), nn.MaxPool2d(2, 1)]
        second = [nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten()]
        return nn.Sequential(*first, *second, nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    if name == "resnet20":
        return resnet(1, 3)
    return ViT() if name == "vit" else Language()


def device_network(name: str, tiny: bool) -> nn.Module:
    """Returns the network of a case of `benchmarks.device`."""
    sizes = {"width": 16, "depth": 2, "heads": 2} if tiny else _BASE
    if name.startswith("ViT"):
        return ViT(side=32 if tiny else 224, patch=16, **sizes)
    if name.startswith("wrn"):
        depth = int(name.split("_")[1])
        return resnet(1, 1) if tiny else resnet(4, (depth - 4) // 6)
    vocabulary, length = (61, 16) if tiny else (50_257, 1024)
    model = Language(vocabulary, length, **sizes)
    return with_lora(model, 8) if "lora" in name else model


_BASE = {"width": 768, "depth": 12, "heads": 12}  # of ViT-B/16 and GPT-2 small


def synchronised(step: Callable) -> Callable:
    """Returns a step that waits until the GPU has computed it."""

    def waiting():
        step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    return waiting


def watched(step: Callable) -> tuple[Callable, float | None]:
    """Returns a step, and its peak of memory in MB, which is None on a CPU."""
    waiting = synchronised(step)
    if DEVICE == "cpu":
        return waiting, None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    waiting()
    return waiting, torch.cuda.max_memory_allocated() / 1e6


def stepped(optimizer, loss: Callable) -> Callable:
    """Returns a step that moves what the optimizer has against the gradient of a loss."""

    def step():
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def steps(name: str, size: int, clip_norm: float, noise_multiplier: float) -> dict[str, Callable]:
    """Returns the steps of a case on one fixed batch."""
    if name == "lm":
        tokens = torch.randint(VOCABULARY, (size, LENGTH + 1))
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
    else:
        shape = (1, 28, 28) if name in ("mlp", "cnn") else (3, 32, 32)
        inputs, labels = torch.rand(size, *shape), torch.from_numpy(np.arange(size) % CLASSES)
    batch = (inputs.to(DEVICE), labels.to(DEVICE))
    makers = makers_of(lambda: network(name), batch, clip_norm, noise_multiplier)
    return {step: make()[0] for step, make in makers.items() if step != "fastDP"}


def device_steps(
    name: str, batch, count: int, clip_norm: float, noise_multiplier: float, *, tiny: bool
) -> dict[str, Maker]:
    """Returns makers of the steps of a case of `benchmarks.device`.

    Each returns a step, and its peak of memory in MB, which is None on a CPU.

    Args:
      name: The name of the case.
      batch: A physical batch, tokens or a dict of images and labels.
      count: The number of physical batches of a step.
      clip_norm, noise_multiplier: Of the private steps.
      tiny: Whether the shapes are those of `--tiny`.
    """
    if isinstance(batch, dict):
        inputs = torch.from_numpy(np.array(batch["x"]).transpose(0, 3, 1, 2).copy())
        labels = torch.from_numpy(np.array(batch["label"], np.int64))
    else:
        tokens = torch.from_numpy(np.array(batch, np.int64))
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
    return makers_of(
        lambda: device_network(name, tiny),
        (inputs.to(DEVICE), labels.to(DEVICE)),
        clip_norm,
        noise_multiplier,
        count=count,
        half="bfloat16" in name,
    )


def makers_of(
    build: Callable,
    batch: tuple[torch.Tensor, torch.Tensor],
    clip_norm: float,
    noise_multiplier: float,
    *,
    count: int = 1,
    half: bool = False,
) -> dict[str, Maker]:
    """Returns makers of the steps by name, each of `count` physical batches, in bfloat16 with
    `half`."""
    inputs, labels = batch
    how = {"noise_multiplier": noise_multiplier, "max_grad_norm": clip_norm}

    def made():
        torch.manual_seed(0)
        model = build().to(DEVICE)
        moving = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.SGD(moving, 0.01, momentum=0.9)

    def logits_of(model):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
            return model(inputs).float()

    def loss_of(model, reduction="mean"):
        losses = nn.functional.cross_entropy(
            logits_of(model).flatten(0, -2), labels.flatten(), reduction=reduction
        )
        return losses if reduction == "mean" else losses.view(len(inputs), -1).mean(1).mean()

    def summed(optimizer, loss):
        def step():
            for _ in range(count):
                loss().backward()
            optimizer.step()
            optimizer.zero_grad()

        return watched(step)

    def plain():
        model, optimizer = made()
        return summed(optimizer, lambda: loss_of(model))

    def private(optimizer, loss):
        def step():
            for k in range(count):
                optimizer.signal_skip_step(do_skip=k < count - 1)
                loss().backward()
                optimizer.step()
                optimizer.zero_grad()

        return watched(step)

    def opacus(functorch):
        model, optimizer = made()
        wrapped = GradSampleModule(model, force_functorch=functorch)
        examples = count * len(inputs)
        return private(
            DPOptimizer(optimizer, expected_batch_size=examples, **how),
            lambda: loss_of(wrapped, "none"),
        )

    def ghost():
        model, optimizer = made()
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(inputs, labels), len(inputs)
        )
        wrapped, clipping, criterion, _ = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            criterion=nn.CrossEntropyLoss(),
            poisson_sampling=False,
            grad_sample_mode="ghost",
            **how,
        )
        return private(clipping, lambda: criterion(logits_of(wrapped), labels))

    def fast():
        import fastDP

        model, optimizer = made()
        examples = count * len(inputs)
        sizes = {"batch_size": examples, "sample_size": 50 * examples, "epochs": 1}
        engine = fastDP.PrivacyEngine(model, **sizes, **how, clipping_mode="MixOpt")
        engine.attach(optimizer)
        return summed(optimizer, lambda: loss_of(model, "none"))

    found = {
        "torch plain": plain,
        "Opacus hooks": lambda: opacus(False),
        "Opacus functorch": lambda: opacus(True),
        "fastDP": fast,
    }
    return found if labels.ndim > 1 else found | {"Opacus ghost": ghost}
