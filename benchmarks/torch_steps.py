"""The networks of `bench_steps` in PyTorch, and their steps: plain, and private by Opacus in three
modes.

They run on a GPU where PyTorch finds one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from opacus import GradSampleModule, PrivacyEngine
from opacus.optimizers import DPOptimizer
from torch import nn

CLASSES, VOCABULARY, LENGTH, WIDTH, DEPTH, HEADS = 10, 4096, 128, 256, 4, 4
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


class ViT(nn.Module):
    """A vision transformer. The defaults are the small one."""

    def __init__(
        self, side: int = 32, patch: int = 4, width: int = 192, depth: int = 6, heads: int = 3
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Embedding((side // patch) ** 2, width)
        self.blocks = nn.Sequential(*[Block(width, heads, False) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000 if side > 32 else CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        places = self.places(
            torch.arange(x.shape[1], device=x.device).expand(len(x), -1).contiguous()
        )
        return self.head(self.norm(self.blocks(x + places)).mean(1))


class Language(nn.Module):
    """A causal transformer. Opacus does not clip a shared embedding, so the output layer is its
    own."""

    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        length: int = LENGTH,
        width: int = WIDTH,
        depth: int = DEPTH,
        heads: int = HEADS,
    ) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads, True) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.places(
            torch.arange(x.shape[1], device=x.device).expand(len(x), -1).contiguous()
        )
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


def wide_resnet(depth: int, width: int) -> nn.Module:
    """Returns the convolutions of a WideResNet."""
    widths = [16 * width * 2**k for k in range(3) for _ in range((depth - 4) // 6)]
    blocks = [Residual(a, b, 1 + (16 < a < b)) for a, b in zip([16, *widths], widths, strict=False)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()]
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES)
    )


def network(name: str) -> nn.Module:
    """Returns the network of a case."""
    if name == "mlp":
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, CLASSES),
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
            Residual(before, width, 1 + (before < width))
            for before, width in zip([16, *widths], widths, strict=False)
        ]
        stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()]
        return nn.Sequential(
            *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)
        )
    return ViT() if name == "vit" else Language()


def synchronised(step: Callable[[], None]) -> Callable[[], None]:
    """Returns a step that waits until the GPU has computed it."""

    def waiting() -> None:
        step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    return waiting


def steps(
    name: str, size: int, clip_norm: float, noise_multiplier: float
) -> dict[str, Callable[[], Any]]:
    """Returns the steps of a case on one fixed batch."""
    if name == "lm":
        tokens = torch.randint(VOCABULARY, (size, LENGTH + 1))
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
    else:
        shape = (1, 28, 28) if name in ("mlp", "cnn") else (3, 32, 32)
        inputs, labels = torch.rand(size, *shape), torch.from_numpy(np.arange(size) % CLASSES)
    inputs, labels = inputs.to(DEVICE), labels.to(DEVICE)

    def made() -> Any:
        torch.manual_seed(0)
        model = network(name).to(DEVICE)
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
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=clip_norm,
            expected_batch_size=size,
        )

        def step() -> None:
            private.zero_grad()
            logits = wrapped(inputs)
            losses = nn.functional.cross_entropy(
                logits.flatten(0, -2), labels.flatten(), reduction="none"
            )
            losses.view(size, -1).mean(1).mean().backward()
            private.step()

        return step

    def ghost() -> Callable[[], Any]:
        model, optimizer = made()
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(inputs, labels), batch_size=size
        )
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
    return {step: synchronised(call) for step, call in found.items()}


def device_steps(
    name: str, batch: Any, count: int, clip_norm: float, noise_multiplier: float, *, tiny: bool
) -> dict[str, Callable[[], tuple[Callable[[], Any], float | None]]]:
    """Returns makers of the steps of a case of `benchmarks.device`.

    Each returns a step, and its peak of memory in MB, which is None on a CPU.

    Args:
      name: The name of the case.
      batch: A physical batch, tokens or a dict of images and labels.
      count: The number of physical batches of a step.
      clip_norm, noise_multiplier: Of the private steps.
      tiny: Whether the shapes are those of `--tiny`.
    """
    text = not isinstance(batch, dict)
    if text:
        tokens = torch.from_numpy(np.array(batch, np.int64)).to(DEVICE)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
    else:
        inputs = torch.from_numpy(np.array(batch["x"]).transpose(0, 3, 1, 2).copy()).to(DEVICE)
        labels = torch.from_numpy(np.array(batch["label"], np.int64)).to(DEVICE)

    def built() -> nn.Module:
        small = {"width": 16, "depth": 2, "heads": 2}
        if name.startswith("ViT"):
            return ViT(
                **(
                    {"side": 32, "patch": 16, **small}
                    if tiny
                    else {"side": 224, "patch": 16, **_BASE}
                )
            )
        if name.startswith("wrn"):
            return wide_resnet(10, 1) if tiny else wide_resnet(int(name.split("_")[1]), 4)
        sizes = (
            {"vocabulary": 61, "length": 16, **small}
            if tiny
            else {"vocabulary": 50_257, "length": 1024, **_BASE}
        )
        model = Language(**sizes)
        return with_lora(model, 8) if "lora" in name else model

    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = built().to(DEVICE)
        return model, torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad], 0.01, momentum=0.9
        )

    def loss_of(model: nn.Module, reduction: str = "mean") -> torch.Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled="bfloat16" in name):
            logits = model(inputs)
        losses = nn.functional.cross_entropy(
            logits.float().flatten(0, -2), labels.flatten(), reduction=reduction
        )
        return losses if reduction == "mean" else losses.view(len(inputs), -1).mean(1).mean()

    def watched(step: Callable[[], None]) -> tuple[Callable[[], Any], float | None]:
        waiting = synchronised(step)
        if DEVICE == "cpu":
            return waiting, None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        waiting()
        return waiting, torch.cuda.max_memory_allocated() / 1e6

    def plain() -> tuple[Callable[[], Any], float | None]:
        model, optimizer = made()

        def step() -> None:
            for _ in range(count):
                loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()

        return watched(step)

    def opacus(functorch: bool, ghost: bool) -> tuple[Callable[[], Any], float | None]:
        model, optimizer = made()
        how = {"noise_multiplier": noise_multiplier, "max_grad_norm": clip_norm}
        if ghost:
            loader = torch.utils.data.DataLoader(
                torch.utils.data.TensorDataset(inputs, labels), len(inputs)
            )
            wrapped, private, criterion, _ = PrivacyEngine().make_private(
                module=model,
                optimizer=optimizer,
                data_loader=loader,
                criterion=nn.CrossEntropyLoss(),
                poisson_sampling=False,
                grad_sample_mode="ghost",
                **how,
            )
        else:
            wrapped = GradSampleModule(model, force_functorch=functorch)
            private = DPOptimizer(optimizer, expected_batch_size=count * len(inputs), **how)

        def step() -> None:
            for k in range(count):
                private.signal_skip_step(do_skip=k < count - 1)
                if ghost:
                    with torch.autocast(DEVICE, torch.bfloat16, enabled="bfloat16" in name):
                        logits = wrapped(inputs)
                    criterion(logits.float(), labels).backward()
                else:
                    loss_of(wrapped, "none").backward()
                private.step()
                private.zero_grad()

        return watched(step)

    def fast() -> tuple[Callable[[], Any], float | None]:
        import fastDP

        model, optimizer = made()
        examples = count * len(inputs)
        how = {
            "batch_size": examples,
            "sample_size": 50 * examples,
            "epochs": 1,
            "max_grad_norm": clip_norm,
        }
        fastDP.PrivacyEngine(
            model, **how, noise_multiplier=noise_multiplier, clipping_mode="MixOpt"
        ).attach(optimizer)

        def step() -> None:
            for _ in range(count):
                loss_of(model, "none").backward()
            optimizer.step()
            optimizer.zero_grad()

        return watched(step)

    found = {
        "torch plain": plain,
        "Opacus hooks": lambda: opacus(False, False),
        "Opacus functorch": lambda: opacus(True, False),
        "fastDP": fast,
    }
    if not text:
        found["Opacus ghost"] = lambda: opacus(False, True)
    return found


_BASE = {"width": 768, "depth": 12, "heads": 12}  # of ViT-B/16 and GPT-2 small
