"""Trains the embedded CIFAR-10 network: a ResNet-20 (He et al., arXiv 1512.03385, §4.2) taught by a wider one.

    python weights/train_cifar10.py --data DIR --epochs 60,150 --output weights/resnet20-cifar10.safetensors

DIR holds CIFAR-10 as ``train_jpeg.npz`` and ``test_jpeg.npz`` (``jpeg``: all files' bytes back to back, ``offsets``:
n + 1 int64, ``labels``) and, lossless, ``test200_lossless.npz`` (``images``: (200, 32, 32, 3) uint8, ``labels``).

What is done, in this order:

1. A tenth of the training images is set aside. A teacher and one student per candidate of ``--epochs`` learn on the
   rest; the candidate that is best on the tenth is chosen. Nothing else is chosen by measurement.
2. Teacher and student learn again, on all training images, with that number of epochs.
3. The student is stored in float16, read back from the file, and measured once on the test images.

The student learns from the teacher's softened outputs (Hinton et al., "Distilling the Knowledge in a Neural Network",
arXiv 1503.02531). Augmentation: random crops of the image padded by 4, random mirroring. The record (data hashes,
command, device, accuracies) goes beside the weights as JSON and, in short, into their metadata. Needs a GPU, torch,
Pillow and this package.
"""

import argparse
import datetime
import hashlib
import io
import itertools
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import load_file
from torch import nn
from torch.nn import functional as F  # noqa: N812

from cupy_resnet.weights_store import convert

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
TEACHER_WIDTH, TEACHER_EPOCHS = 64, 40
TEMPERATURE, SOFT_SHARE = 4.0, 0.9
BATCH, PEAK_LR, WEIGHT_DECAY = 512, 0.4, 5e-4


class Block(nn.Module):
    """A basic block with He et al.'s option-A shortcut: every second pixel, channels padded with zeros."""

    def __init__(self, channels: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.stride, self.pad = stride, (planes - channels) // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.pad:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.pad, self.pad))
        return F.relu(y + x)


class Network(nn.Module):
    """ResNet-20 of any width; parameter names are those that cupy_resnet reads."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        channels = width
        for stage in (1, 2, 3):
            planes = width << (stage - 1)
            blocks = [Block(channels if i == 0 else planes, planes, 2 if stage > 1 and i == 0 else 1) for i in range(3)]
            setattr(self, f"layer{stage}", nn.Sequential(*blocks))
            channels = planes
        self.linear = nn.Linear(channels, len(CLASSES))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.linear(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


def decode(jpeg: bytes) -> np.ndarray:
    """The pixels of one JPEG file, (32, 32, 3) uint8."""
    return np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"))


def read(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (n, 3, 32, 32) uint8 and labels (n,) int64 of one of the data files."""
    with np.load(path, allow_pickle=False) as archive:
        labels = torch.from_numpy(archive["labels"].astype(np.int64))
        if "images" in archive:
            images = archive["images"]
        else:
            data, offsets = archive["jpeg"].tobytes(), archive["offsets"]
            files = [data[a:b] for a, b in itertools.pairwise(offsets)]
            with ProcessPoolExecutor() as pool:
                images = np.stack(list(pool.map(decode, files, chunksize=500)))
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))), labels


def normalized(images: torch.Tensor) -> torch.Tensor:
    """uint8 images to the network's input, channels last."""
    mean, std = (torch.tensor(v, device=images.device).view(1, 3, 1, 1) for v in (MEAN, STD))
    return ((images.float() / 255 - mean) / std).contiguous(memory_format=torch.channels_last)


def augmented(images: torch.Tensor) -> torch.Tensor:
    """A random crop of each image padded by 4, mirrored or not."""
    n, device = len(images), images.device
    padded = F.pad(images, (4, 4, 4, 4))
    rows = torch.randint(9, (n, 1), device=device) + torch.arange(32, device=device)
    columns = torch.randint(9, (n, 1), device=device) + torch.arange(32, device=device)
    columns = torch.where(torch.rand(n, 1, device=device) < 0.5, columns, columns.flip(1))
    index = torch.arange(n, device=device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


class Step:
    """Forward and backward pass on a batch of fixed size, captured as a CUDA graph, since launches would dominate."""

    def __init__(self, student: nn.Module, teacher: nn.Module | None, device: torch.device) -> None:
        self.student, self.teacher = student, teacher
        self.x = torch.zeros(BATCH, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
        self.y = torch.zeros(BATCH, dtype=torch.int64, device=device)
        state = {k: v.clone() for k, v in student.state_dict().items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.compute()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.compute()
        student.load_state_dict(state)

    def compute(self) -> None:
        for parameter in self.student.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.zero_()
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            logits = self.student(self.x)
            if self.teacher is not None:
                with torch.no_grad():
                    target = self.teacher(self.x)
        if self.teacher is None:
            loss = F.cross_entropy(logits.float(), self.y, label_smoothing=0.1)
        else:
            log_probabilities = F.log_softmax(logits.float() / TEMPERATURE, 1)
            soft = F.kl_div(log_probabilities, F.softmax(target.float() / TEMPERATURE, 1), reduction="batchmean")
            hard = F.cross_entropy(logits.float(), self.y)
            loss = SOFT_SHARE * TEMPERATURE**2 * soft + (1 - SOFT_SHARE) * hard
        loss.backward()

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()


def train(
    images: torch.Tensor, labels: torch.Tensor, *, width: int, epochs: int, seed: int, teacher: nn.Module | None = None
) -> Network:
    """Trains a network by SGD with Nesterov momentum, warm-up and a cosine schedule."""
    torch.manual_seed(seed)
    device = images.device
    model = Network(width).to(device, memory_format=torch.channels_last).train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=PEAK_LR, momentum=0.9, nesterov=True)
    steps_per_epoch = len(images) // BATCH
    total, warmup = epochs * steps_per_epoch, 3 * steps_per_epoch
    step = Step(model, teacher, device)
    start, done = time.time(), 0
    for _ in range(epochs):
        order = torch.randperm(len(images), device=device)
        for i in range(steps_per_epoch):
            rate = min(1.0, (done + 1) / warmup) * 0.5 * (1 + np.cos(np.pi * done / total))
            for group in optimizer.param_groups:
                group["lr"] = PEAK_LR * rate
            batch = order[i * BATCH : (i + 1) * BATCH]
            step(normalized(augmented(images[batch])), labels[batch])
            optimizer.step()
            done += 1
    print(f"width {width}, {epochs} epochs: {time.time() - start:.0f} s", file=sys.stderr, flush=True)
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of images classified right, in float32."""
    right = sum(
        int((model(normalized(x)).argmax(1) == y).sum())
        for x, y in zip(images.split(1000), labels.split(1000), strict=True)
    )
    return right / len(images)


def teach(images: torch.Tensor, labels: torch.Tensor, epochs: list[int]) -> tuple[Network, dict[int, Network]]:
    """A teacher, and a student for each number of epochs."""
    teacher = train(images, labels, width=TEACHER_WIDTH, epochs=TEACHER_EPOCHS, seed=0)
    return teacher, {n: train(images, labels, width=16, epochs=n, seed=1, teacher=teacher) for n in epochs}


def sha256(path: Path) -> str:
    """sha256 of a file in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Chooses, trains, stores and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", default="60,150", help="candidates, separated by commas")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    candidates = [int(n) for n in options.epochs.split(",")]
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda")

    names = ("train_jpeg.npz", "test_jpeg.npz", "test200_lossless.npz")
    (images, labels), test, lossless = ([t.to(device) for t in read(options.data / name)] for name in names)
    split = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).to(device)
    held, rest = split[: len(images) // 10], split[len(images) // 10 :]
    teacher, students = teach(images[rest], labels[rest], candidates)
    validation = {n: accuracy(student, images[held], labels[held]) for n, student in students.items()}
    teacher_validation = accuracy(teacher, images[held], labels[held])
    epochs = max(validation, key=validation.__getitem__)
    print(f"validation {validation}, teacher {teacher_validation}: {epochs} epochs", file=sys.stderr, flush=True)

    _, students = teach(images, labels, [epochs])
    state = {k: v for k, v in students[epochs].state_dict().items() if not k.endswith("num_batches_tracked")}
    record = {
        "model": "resnet20",
        "command": "python " + " ".join(["weights/train_cifar10.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "data_sha256": {name: sha256(options.data / name) for name in names},
        "validation_accuracy": {str(n): value for n, value in validation.items()},
        "teacher_validation_accuracy": teacher_validation,
        "epochs": epochs,
    }
    training = {k: record[k] for k in ("date", "epochs", "validation_accuracy")}
    convert(
        "resnet20",
        {k: v.cpu().numpy() for k, v in state.items()},
        options.output,
        dtype="float16",
        categories=CLASSES,
        resize=32,
        crop=32,
        mean=MEAN,
        std=STD,
        source="trained by this project on CIFAR-10: weights/train_cifar10.py",
        training=training,
    )

    stored = Network().to(device).eval()
    loaded = {k: torch.from_numpy(v.astype(np.float32)) for k, v in load_file(options.output).items()}
    outcome = stored.load_state_dict(loaded, strict=False)
    assert not outcome.unexpected_keys
    assert all(key.endswith("num_batches_tracked") for key in outcome.missing_keys)
    record["sha256"] = sha256(options.output)
    record["test_accuracy"] = {"test_jpeg": accuracy(stored, *test), "test200_lossless": accuracy(stored, *lossless)}
    options.output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1), file=sys.stderr)


if __name__ == "__main__":
    main()
